// Stand-in for livenessprobe, whose module no registry has: answers /healthz with what the driver's Probe says.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	timeout := flag.Duration("probe-timeout", time.Second, "how long a probe may take")
	port := flag.String("health-port", "9808", "where /healthz is served")
	flag.Int("v", 0, "taken and not used")
	flag.Parse()
	connection, err := grpc.NewClient("unix://"+*address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	driver := csi.NewIdentityClient(connection)
	http.HandleFunc("/healthz", func(answer http.ResponseWriter, request *http.Request) {
		ctx, cancel := context.WithTimeout(request.Context(), *timeout)
		defer cancel()
		probe, err := driver.Probe(ctx, &csi.ProbeRequest{})
		switch {
		case err != nil:
			log.Printf("probe: %v", err)
			http.Error(answer, err.Error(), http.StatusInternalServerError)
		case probe.Ready != nil && !probe.Ready.Value:
			http.Error(answer, "the driver is not ready", http.StatusInternalServerError)
		}
	})
	log.Fatal(http.ListenAndServe(net.JoinHostPort("", *port), nil))
}
