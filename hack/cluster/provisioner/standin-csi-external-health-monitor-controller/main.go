// Stand-in for csi-external-health-monitor-controller, whose module no registry has: asks the driver for its volumes now
// and then, and logs those whose condition is abnormal. The real one makes events of them.
package main

import (
	"context"
	"flag"
	"log"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	interval := flag.Duration("list-volumes-interval", 5*time.Minute, "how often it asks")
	flag.Int("v", 0, "taken and not used")
	flag.Parse()
	connection, err := grpc.NewClient("unix://"+*address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	driver := csi.NewControllerClient(connection)
	for ; ; time.Sleep(*interval) {
		request := &csi.ListVolumesRequest{}
		for {
			page, err := driver.ListVolumes(context.Background(), request, grpc.WaitForReady(true))
			if err != nil {
				log.Printf("ListVolumes: %v", err)
				break
			}
			for _, entry := range page.Entries {
				if condition := entry.GetStatus().GetVolumeCondition(); condition.GetAbnormal() {
					log.Printf("%s: %s", entry.Volume.VolumeId, condition.Message)
				}
			}
			if page.NextToken == "" {
				break
			}
			request.StartingToken = page.NextToken
		}
	}
}
