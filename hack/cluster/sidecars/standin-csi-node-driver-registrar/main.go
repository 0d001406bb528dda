// Stand-in for csi-node-driver-registrar, whose module no registry has: tells kubelet the driver's name and socket, and
// answers /healthz while kubelet can reach it.
package main

import (
	"context"
	"errors"
	"flag"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type registrar struct {
	registration.UnimplementedRegistrationServer
	info registration.PluginInfo
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: r.info.Type, Name: r.info.Name, Endpoint: r.info.Endpoint, SupportedVersions: r.info.SupportedVersions,
	}, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		log.Fatalf("kubelet refused %s: %s", r.info.Name, status.Error)
	}
	log.Printf("registered %s at %s", r.info.Name, r.info.Endpoint)
	return &registration.RegistrationStatusResponse{}, nil
}

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket as this container sees it")
	endpoint := flag.String("kubelet-registration-path", "", "the driver's socket as kubelet sees it")
	directory := flag.String("plugin-registration-path", "/registration", "where kubelet looks for registrars")
	health := flag.String("http-endpoint", "", "where /healthz is served")
	flag.Int("v", 0, "taken and not used")
	flag.Parse()
	connection, err := grpc.NewClient("unix://"+*address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	driver, err := csi.NewIdentityClient(connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	cancel()
	if err != nil {
		log.Fatal(err)
	}
	socket := filepath.Join(*directory, driver.Name+"-reg.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	if *health != "" {
		http.HandleFunc("/healthz", func(answer http.ResponseWriter, _ *http.Request) {
			if _, err := os.Stat(socket); err != nil {
				http.Error(answer, err.Error(), http.StatusInternalServerError)
			}
		})
		go func() { log.Fatal(http.ListenAndServe(*health, nil)) }()
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &registrar{info: registration.PluginInfo{
		Type: registration.CSIPlugin, Name: driver.Name, Endpoint: *endpoint, SupportedVersions: []string{"1.0.0"},
	}})
	log.Fatal(server.Serve(listener))
}
