// Copies a snapshot in full, then only the blocks that the next one changed. Usage: first_delta SOCKET DIRECTORY
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

var retry = []codes.Code{codes.Unavailable, codes.Internal, codes.Aborted}

type message interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetBlockMetadata() []*csi.BlockMetadata
}

// ranges yields each range. It ends without an error only where the driver ended the answer with OK.
func ranges[M message, S interface{ Recv() (M, error) }](call func(offset int64) (S, error)) iter.Seq2[*csi.BlockMetadata, error] {
	return func(yield func(*csi.BlockMetadata, error) bool) {
		offset, kind := int64(0), csi.BlockMetadataType_UNKNOWN
		for retries := 5; ; retries-- {
			stream, err := call(offset)
			for err == nil {
				var part M
				if part, err = stream.Recv(); err != nil {
					break
				}
				kind = cmp.Or(kind, part.GetBlockMetadataType())
				if part.GetBlockMetadataType() != kind || kind == csi.BlockMetadataType_UNKNOWN {
					err = fmt.Errorf("block_metadata_type %v", part.GetBlockMetadataType())
					break
				}
				for _, found := range part.GetBlockMetadata() {
					if !yield(found, nil) {
						return
					}
					// A cut answer continues at the byte after the last range.
					offset, retries = found.ByteOffset+found.SizeBytes, 5
				}
			}
			if errors.Is(err, io.EOF) {
				return
			}
			code := status.Code(err)
			if retries == 0 || !slices.Contains(retry, code) {
				yield(nil, err)
				return
			}
			fmt.Printf("%v: continues at byte %d\n", code, offset)
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
	take := func(name string) string {
		return must(controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: disk, Name: name})).Snapshot.SnapshotId
	}
	monday, tuesday := take("monday"), take("tuesday")
	backup := must(os.Create(filepath.Join(directory, "backup.img")))

	// It copies what is listed of a snapshot, then compares all. The snapshot's bytes are those of a volume made from it.
	backUp := func(id string, listed iter.Seq2[*csi.BlockMetadata, error]) {
		snapshot := &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}
		volume := create("of-"+id, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: snapshot}})
		path := filepath.Join(directory, volume.VolumeId)
		must(node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: volume.VolumeId, TargetPath: path, VolumeCapability: block}))
		source, total := must(os.Open(path)), int64(0)
		must(0, backup.Truncate(volume.CapacityBytes))
		for found, err := range listed {
			at := must(found, err).ByteOffset
			total += must(io.Copy(io.NewOffsetWriter(backup, at), io.NewSectionReader(source, at, found.SizeBytes)))
		}
		if !bytes.Equal(must(os.ReadFile(path)), must(os.ReadFile(backup.Name()))) {
			log.Fatalf("%s: the backup is DIFFERENT", id)
		}
		fmt.Printf("%s: %d bytes copied, the backup is the same\n", id, total)
	}
	backUp(monday, ranges(func(offset int64) (csi.SnapshotMetadata_GetMetadataAllocatedClient, error) {
		return metadata.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: monday, StartingOffset: offset})
	}))
	backUp(tuesday, ranges(func(offset int64) (csi.SnapshotMetadata_GetMetadataDeltaClient, error) {
		return metadata.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: monday, TargetSnapshotId: tuesday, StartingOffset: offset})
	}))
}
