// Copies a snapshot in full, then only the blocks that the next one changed. Usage: first_delta SOCKET DIRECTORY
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

type message interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetBlockMetadata() []*csi.BlockMetadata
}

// ranges hands each range to use. It returns nil only where the driver ended the answer with OK.
func ranges[M message, S interface{ Recv() (M, error) }](call func(offset int64) (S, error), use func(offset, size int64) error) error {
	offset, kind := int64(0), csi.BlockMetadataType_UNKNOWN
	for retries := 5; ; retries-- {
		stream, err := call(offset)
		for err == nil {
			var part M
			if part, err = stream.Recv(); err != nil {
				break
			}
			if kind == csi.BlockMetadataType_UNKNOWN {
				kind = part.GetBlockMetadataType()
			}
			if part.GetBlockMetadataType() != kind || kind == csi.BlockMetadataType_UNKNOWN {
				return fmt.Errorf("block_metadata_type %v", part.GetBlockMetadataType())
			}
			for _, found := range part.GetBlockMetadata() {
				if err := use(found.ByteOffset, found.SizeBytes); err != nil {
					return err
				}
				// A cut answer continues at the byte after the last range.
				offset = found.ByteOffset + found.SizeBytes
				retries = 5
			}
		}
		code := status.Code(err)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case retries > 0 && (code == codes.Unavailable || code == codes.Internal || code == codes.Aborted):
			fmt.Printf("%v: going on at byte %d\n", code, offset)
		default:
			return err
		}
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	ctx, socket, directory := context.Background(), os.Args[1], os.Args[2]
	connection := must(grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials())))
	controller, node := csi.NewControllerClient(connection), csi.NewNodeClient(connection)
	metadata := csi.NewSnapshotMetadataClient(connection)
	block := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
	create := func(name string, source *csi.VolumeContentSource) *csi.Volume {
		return must(controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name, VolumeContentSource: source,
			CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}, VolumeCapabilities: []*csi.VolumeCapability{block}})).Volume
	}
	disk := create("disk", nil).VolumeId
	snapshot := func(name string) string {
		return must(controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: disk, Name: name})).Snapshot.SnapshotId
	}
	monday, tuesday := snapshot("monday"), snapshot("tuesday")
	backup := must(os.Create(filepath.Join(directory, "backup.img")))

	// restore makes a volume from a snapshot: it has the snapshot's bytes.
	restore := func(id string) *os.File {
		source := &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}
		volume := create("of-"+id, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: source}})
		path := filepath.Join(directory, volume.VolumeId)
		must(node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: volume.VolumeId, TargetPath: path, VolumeCapability: block}))
		must(0, backup.Truncate(volume.CapacityBytes))
		return must(os.Open(path))
	}
	backUp := func(id string, list func(use func(offset, size int64) error) error) {
		source, total := restore(id), int64(0)
		must(0, list(func(offset, size int64) error {
			copied, err := io.Copy(io.NewOffsetWriter(backup, offset), io.NewSectionReader(source, offset, size))
			total += copied
			return err
		}))
		if !bytes.Equal(must(os.ReadFile(source.Name())), must(os.ReadFile(backup.Name()))) {
			log.Fatalf("%s: the backup is DIFFERENT", id)
		}
		fmt.Printf("%s: %d bytes copied, the backup is the same\n", id, total)
	}
	backUp(monday, func(use func(offset, size int64) error) error {
		return ranges(func(offset int64) (csi.SnapshotMetadata_GetMetadataAllocatedClient, error) {
			return metadata.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: monday, StartingOffset: offset})
		}, use)
	})
	backUp(tuesday, func(use func(offset, size int64) error) error {
		return ranges(func(offset int64) (csi.SnapshotMetadata_GetMetadataDeltaClient, error) {
			return metadata.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: monday, TargetSnapshotId: tuesday, StartingOffset: offset})
		}, use)
	})
}
