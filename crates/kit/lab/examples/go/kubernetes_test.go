package delta

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// startService starts the mock with the Kubernetes SnapshotMetadata service and returns a connection to that, over TLS.
func startService(t *testing.T, arguments ...string) *grpc.ClientConn {
	t.Helper()
	directory := t.TempDir()
	ca := filepath.Join(directory, "ca.pem")
	line := launch(t, append([]string{"--listen", "unix://" + filepath.Join(directory, "csi.sock"),
		"--kubernetes", "https://127.0.0.1:0", "--ca-file", ca, "--output", "json"}, arguments...)...)
	// The driver's address first, then the service's.
	var ready struct{ Listen []string }
	if err := json.Unmarshal([]byte(line), &ready); err != nil || len(ready.Listen) != 2 {
		t.Fatalf("%s: %v", line, err)
	}
	security, err := credentials.NewClientTLSFromFile(ca, "")
	if err != nil {
		t.Fatal(err)
	}
	return connect(t, strings.TrimPrefix(ready.Listen[1], "https://"), security)
}

// listWithToken reads a delta to its end, as a backup application in a cluster does.
func listWithToken(ctx context.Context, connection *grpc.ClientConn, token string) (blocks []*api.BlockMetadata, err error) {
	stream, err := api.NewSnapshotMetadataClient(connection).GetMetadataDelta(ctx, &api.GetMetadataDeltaRequest{
		SecurityToken:      token,
		Namespace:          "shop",
		BaseSnapshotId:     "disk-1",
		TargetSnapshotName: "disk-2",
	})
	if err != nil {
		return nil, err
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return blocks, nil
		}
		if err != nil {
			return blocks, err
		}
		blocks = append(blocks, message.GetBlockMetadata()...)
	}
}

func TestDeltaOfKubernetes(t *testing.T) {
	connection := startService(t, "--token", "sesame", "--volume", "disk=1Ti", "--snapshots", "2", "--changes", "50000",
		"--block-metadata-type", "fixed")
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	blocks, err := listWithToken(ctx, connection, "sesame")
	if err != nil {
		t.Fatal(err)
	}
	if len(blocks) != 50000 {
		t.Fatalf("%d blocks, not 50000", len(blocks))
	}
	if _, err := listWithToken(ctx, connection, "other"); status.Code(err) != codes.Unauthenticated {
		t.Fatalf("%v, not UNAUTHENTICATED", err)
	}

	// This one call meets a fault.
	faulty := metadata.AppendToOutgoingContext(ctx, "cbt-lab-fault", "cut:after=3,code=UNAVAILABLE")
	blocks, err = listWithToken(faulty, connection, "sesame")
	if status.Code(err) != codes.Unavailable || len(blocks) != 3*1024 {
		t.Fatalf("%d blocks and %v, not 3072 and UNAVAILABLE", len(blocks), err)
	}
}
