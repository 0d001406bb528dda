// backup-example is a block backup in one page: it asks which blocks a snapshot holds, or which changed since another,
// and copies those, and no others, from a volume restored from the snapshot into an image file. It speaks the
// Kubernetes SnapshotMetadata API (KEP-3314), so it works with any CSI driver that serves it.
//
//	backup-example list   -snapshot NAME [-base NAME | -base-id HANDLE] [-table]
//	backup-example copy   -snapshot NAME [-base NAME | -base-id HANDLE] -device DEVICE -image FILE
//	backup-example verify -device DEVICE -image FILE
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/api"
	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"k8s.io/client-go/tools/clientcmd"
)

type options struct {
	namespace, snapshot string
	base, baseID        string
	serviceAccount      string
	kubeconfig          string
	device, image       string
	table               bool
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "backup-example:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 0 {
		return fmt.Errorf("say what to do: list, copy or verify")
	}
	var o options
	flags := flag.NewFlagSet("backup-example "+arguments[0], flag.ExitOnError)
	flags.StringVar(&o.namespace, "namespace", os.Getenv("NAMESPACE"), "namespace of the snapshots; also NAMESPACE")
	flags.StringVar(&o.snapshot, "snapshot", "", "VolumeSnapshot to read")
	flags.StringVar(&o.base, "base", "", "VolumeSnapshot that the backup holds already; without it, a full backup")
	flags.StringVar(&o.baseID, "base-id", "", "the same by its CSI handle: it may be deleted, where the driver keeps what deltas want")
	flags.StringVar(&o.serviceAccount, "service-account", "", "account whose token is shown; default: the caller's own")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "outside of a cluster: how to reach it")
	flags.BoolVar(&o.table, "table", false, "list as the community's snapshot-metadata-lister does")
	flags.StringVar(&o.device, "device", "", "device of a volume restored from the snapshot")
	flags.StringVar(&o.image, "image", "", "file that holds the backup")
	if err := flags.Parse(arguments[1:]); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	switch arguments[0] {
	case "list":
		if o.table {
			return o.stream(ctx, &iterator.TableEmitter{Writer: os.Stdout})
		}
		total := &totals{}
		if err := o.each(ctx, total.print); err != nil {
			return err
		}
		fmt.Println(total)
		return nil
	case "copy":
		return o.copy(ctx)
	case "verify":
		return o.verify()
	default:
		return fmt.Errorf("%q is none of list, copy and verify", arguments[0])
	}
}

// each calls take for every message of the stream: of the blocks that changed since the base, or of all that hold data.
func (o options) each(ctx context.Context, take func(iterator.IteratorMetadata) error) error {
	return o.stream(ctx, emitter(take))
}

func (o options) stream(ctx context.Context, to iterator.IteratorEmitter) error {
	config, err := clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	if err != nil {
		return err
	}
	clients, err := iterator.BuildClients(config)
	if err != nil {
		return err
	}
	arguments := iterator.Args{
		Clients: clients, Emitter: to,
		Namespace: o.namespace, SnapshotName: o.snapshot, PrevSnapshotName: o.base, PrevSnapshotID: o.baseID,
	}
	if o.serviceAccount != "" {
		arguments.SANamespace, arguments.SAName = o.namespace, o.serviceAccount
	}
	return iterator.GetSnapshotMetadata(ctx, arguments)
}

type emitter func(iterator.IteratorMetadata) error

func (e emitter) SnapshotMetadataIteratorRecord(_ int, record iterator.IteratorMetadata) error {
	return e(record)
}

func (e emitter) SnapshotMetadataIteratorDone(int) error { return nil }

// totals counts what a stream lists.
type totals struct {
	kind                    api.BlockMetadataType
	capacity, tuples, bytes int64
}

func (t *totals) add(record iterator.IteratorMetadata) {
	t.kind, t.capacity = record.BlockMetadataType, record.VolumeCapacityBytes
	for _, block := range record.BlockMetadata {
		t.tuples++
		t.bytes += block.SizeBytes
	}
}

func (t *totals) print(record iterator.IteratorMetadata) error {
	t.add(record)
	for _, block := range record.BlockMetadata {
		fmt.Printf("%16d %12d\n", block.ByteOffset, block.SizeBytes)
	}
	return nil
}

func (t *totals) String() string {
	return fmt.Sprintf("%d tuples, %d bytes of a volume of %d bytes, %v", t.tuples, t.bytes, t.capacity, t.kind)
}

// copy brings the image from the base to the snapshot; without a base it makes a new one.
func (o options) copy(ctx context.Context) error {
	device, err := os.Open(o.device)
	if err != nil {
		return err
	}
	defer device.Close()
	how := os.O_RDWR
	if o.base == "" && o.baseID == "" {
		how |= os.O_CREATE | os.O_TRUNC
	}
	image, err := os.OpenFile(o.image, how, 0o600)
	if err != nil {
		return err
	}
	defer image.Close()
	started, total := time.Now(), &totals{}
	err = o.each(ctx, func(record iterator.IteratorMetadata) error {
		total.add(record)
		// A volume that grew makes the image grow; what is not copied into it is a hole.
		if err := image.Truncate(record.VolumeCapacityBytes); err != nil {
			return err
		}
		for _, block := range record.BlockMetadata {
			from := io.NewSectionReader(device, block.ByteOffset, block.SizeBytes)
			copied, err := io.Copy(io.NewOffsetWriter(image, block.ByteOffset), from)
			if err != nil {
				return err
			}
			if copied != block.SizeBytes {
				return fmt.Errorf("%s ends inside of the block at %d", o.device, block.ByteOffset)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := image.Sync(); err != nil {
		return err
	}
	fmt.Printf("copied %v in %v\n", total, time.Since(started).Round(time.Millisecond))
	return nil
}

// verify compares every byte of the volume with the image.
func (o options) verify() error {
	device, err := os.Open(o.device)
	if err != nil {
		return err
	}
	defer device.Close()
	image, err := os.Open(o.image)
	if err != nil {
		return err
	}
	defer image.Close()
	const step = 1 << 20
	here, there := make([]byte, step), make([]byte, step)
	for offset := int64(0); ; offset += step {
		n, end := io.ReadFull(device, here)
		m, endThere := io.ReadFull(image, there)
		for _, err := range []error{end, endThere} {
			if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
				return err
			}
		}
		if n != m {
			return fmt.Errorf("%s and %s are not of one size", o.device, o.image)
		}
		if !bytes.Equal(here[:n], there[:m]) {
			return fmt.Errorf("%s and %s differ between bytes %d and %d", o.device, o.image, offset, offset+int64(n))
		}
		if end != nil {
			fmt.Printf("verified: %d bytes are equal\n", offset+int64(n))
			return nil
		}
	}
}
