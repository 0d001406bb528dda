// snapshot-metadata-verifier stands for the community's tool of that name, which Kubernetes' suite for SnapshotMetadata
// fetches from the Internet: it copies what the community's client lists from one device to another, and fails where the
// two are not equal then.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"k8s.io/client-go/rest"
)

type devices struct{ source, target *os.File }

func (d devices) SnapshotMetadataIteratorRecord(_ int, record iterator.IteratorMetadata) error {
	for _, block := range record.BlockMetadata {
		from := io.NewSectionReader(d.source, block.ByteOffset, block.SizeBytes)
		copied, err := io.Copy(io.NewOffsetWriter(d.target, block.ByteOffset), from)
		if err != nil {
			return err
		}
		if copied != block.SizeBytes {
			return fmt.Errorf("the source ends inside of the block at %d", block.ByteOffset)
		}
	}
	return nil
}

func (d devices) SnapshotMetadataIteratorDone(int) error { return nil }

func (d devices) compare() error {
	here, there := make([]byte, 1<<20), make([]byte, 1<<20)
	for offset := int64(0); ; offset += int64(len(here)) {
		n, end := d.source.ReadAt(here, offset)
		m, endThere := d.target.ReadAt(there, offset)
		for _, err := range []error{end, endThere} {
			if err != nil && err != io.EOF {
				return err
			}
		}
		if n != m || !bytes.Equal(here[:n], there[:m]) {
			return fmt.Errorf("the devices differ between bytes %d and %d", offset, offset+int64(max(n, m)))
		}
		if end == io.EOF {
			return nil
		}
	}
}

func run() error {
	var a iterator.Args
	var source, target string
	results := flag.Int("max-results", 0, "tuples a message; 0: what the driver chooses")
	flag.Int64Var(&a.StartingOffset, "starting-offset", 0, "where to begin, in bytes")
	flag.String("kubeconfig", "", "is read by nobody: this runs in the cluster")
	flag.StringVar(&a.Namespace, "namespace", "", "namespace of the snapshots")
	flag.StringVar(&a.SnapshotName, "snapshot", "", "VolumeSnapshot that the source device holds")
	flag.StringVar(&a.PrevSnapshotName, "previous-snapshot", "", "VolumeSnapshot that the target device holds; without, it is empty")
	flag.StringVar(&source, "source-device-path", "", "device to copy from")
	flag.StringVar(&target, "target-device-path", "", "device to copy to")
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
	var d devices
	if d.source, err = os.Open(source); err != nil {
		return err
	}
	if d.target, err = os.OpenFile(target, os.O_RDWR, 0); err != nil {
		return err
	}
	a.Emitter = d
	if err := iterator.GetSnapshotMetadata(context.Background(), a); err != nil {
		return err
	}
	return d.compare()
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
