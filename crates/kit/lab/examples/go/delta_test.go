// A test in Go that starts cbt-lab mock, lists a delta, and lists it again while a fault cuts it.
package delta

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// launch starts the mock and returns its first line, which it prints when it serves. It ends with the test.
func launch(t *testing.T, arguments ...string) string {
	t.Helper()
	program := os.Getenv("CBT_LAB")
	if program == "" {
		program = "cbt-lab"
	}
	mock := exec.Command(program, append([]string{"mock"}, arguments...)...)
	mock.Stderr = os.Stderr
	stdout, err := mock.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := mock.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		mock.Process.Kill()
		mock.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line
}

// connect returns a connection that ends with the test.
func connect(t *testing.T, address string, security credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(security))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return connection
}

// startMock starts the mock and returns a connection to it.
func startMock(t *testing.T, arguments ...string) *grpc.ClientConn {
	t.Helper()
	address := "unix://" + filepath.Join(t.TempDir(), "csi.sock")
	launch(t, append([]string{"--listen", address}, arguments...)...)
	return connect(t, address, insecure.NewCredentials())
}

// listDelta reads a delta to its end.
func listDelta(ctx context.Context, connection *grpc.ClientConn, base, target string) (blocks []*csi.BlockMetadata, err error) {
	stream, err := csi.NewSnapshotMetadataClient(connection).GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{
		BaseSnapshotId:   base,
		TargetSnapshotId: target,
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

func TestDelta(t *testing.T) {
	connection := startMock(t, "--volume", "disk=1Ti", "--snapshots", "2", "--changes", "50000", "--block-metadata-type", "fixed")
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	blocks, err := listDelta(ctx, connection, "disk-1", "disk-2")
	if err != nil {
		t.Fatal(err)
	}
	if len(blocks) != 50000 {
		t.Fatalf("%d blocks, not 50000", len(blocks))
	}

	// This one call meets a fault.
	faulty := metadata.AppendToOutgoingContext(ctx, "cbt-lab-fault", "cut:after=3,code=UNAVAILABLE")
	blocks, err = listDelta(faulty, connection, "disk-1", "disk-2")
	if status.Code(err) != codes.Unavailable || len(blocks) != 3*1024 {
		t.Fatalf("%d blocks and %v, not 3072 and UNAVAILABLE", len(blocks), err)
	}
}
