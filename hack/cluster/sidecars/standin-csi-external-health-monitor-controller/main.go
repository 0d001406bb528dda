// Stand-in for csi-external-health-monitor-controller, whose module no registry has: asks the driver now and then for the
// volumes that are not well, and logs what is wrong with them. The real one writes it into the status of their claims.
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
	flag.Bool("leader-election", false, "taken and not used: what two of them ask and log is the same")
	flag.Parse()
	connection, err := grpc.NewClient("unix://"+*address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	driver := csi.NewControllerClient(connection)
	for ; ; time.Sleep(*interval) {
		request := &csi.ControllerListVolumeHealthRequest{}
		for {
			page, err := driver.ControllerListVolumeHealth(context.Background(), request, grpc.WaitForReady(true))
			if err != nil {
				log.Printf("ControllerListVolumeHealth: %v", err)
				break
			}
			for _, volume := range page.Entries {
				for _, health := range volume.HealthStatuses {
					log.Printf("%s: %s, %s: %s", volume.VolumeId, health.Status, health.Reason, health.Message)
				}
			}
			if page.NextToken == "" {
				break
			}
			request.StartingToken = page.NextToken
		}
	}
}
