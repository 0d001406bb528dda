// snapshot-metadata-verifier stands for the community's tools snapshot-metadata-verifier and, without devices, snapshot-metadata-lister.
// All that they do is in the released package; their mains are in modules that are not released.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"k8s.io/client-go/rest"
)

func run() error {
	a := iterator.Args{Emitter: &iterator.TableEmitter{Writer: os.Stdout}}
	results := flag.Int("max-results", 0, "tuples a message; 0: what the driver chooses")
	flag.Int64Var(&a.StartingOffset, "starting-offset", 0, "where to begin, in bytes")
	flag.String("kubeconfig", "", "is read by nobody: this runs in the cluster")
	flag.StringVar(&a.Namespace, "namespace", "", "namespace of the snapshots")
	flag.StringVar(&a.SnapshotName, "snapshot", "", "VolumeSnapshot that the source device holds")
	flag.StringVar(&a.PrevSnapshotName, "previous-snapshot", "", "VolumeSnapshot that the target device holds; without, it is empty")
	flag.StringVar(&a.PrevSnapshotID, "previous-snapshot-id", "", "the same, by its handle")
	source := flag.String("source-device-path", "", "device to copy from; without, the blocks are listed")
	target := flag.String("target-device-path", "", "device to copy to")
	// The suite gives "-max-results 10" as two words and all others as one.
	flag.Parse()
	a.MaxResults = int32(*results)
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	if a.Clients, err = iterator.BuildClients(config); err != nil {
		return err
	}
	if *source != "" {
		var v iterator.VerifierEmitter
		if v.SourceDevice, err = os.Open(*source); err != nil {
			return err
		}
		if v.TargetDevice, err = os.OpenFile(*target, os.O_RDWR, 0); err != nil {
			return err
		}
		a.Emitter = &v
	}
	return iterator.GetSnapshotMetadata(context.Background(), a)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
