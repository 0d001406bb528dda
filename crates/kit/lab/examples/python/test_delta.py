"""A test in Python that starts cbt-lab mock, lists a delta, and lists it again while a fault cuts it.

It needs grpcio and grpcio-tools, and csi.proto in the directory that CSI_PROTO_DIR names.
"""

import os
import subprocess
import sys
import tempfile
import unittest

import grpc

sys.path.insert(0, os.environ["CSI_PROTO_DIR"])
csi, services = grpc.protos_and_services("csi.proto")


class Delta(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        socket = os.path.join(self.directory.name, "csi.sock")
        self.mock = subprocess.Popen(
            [os.environ.get("CBT_LAB", "cbt-lab"), "mock", "--listen", "unix://" + socket, "--volume", "disk=1Ti"]
            + ["--snapshots", "2", "--changes", "50000", "--block-metadata-type", "fixed"],
            stdout=subprocess.PIPE,
        )
        self.addCleanup(self.stop)
        # It serves once it has said so.
        self.mock.stdout.readline()
        channel = grpc.insecure_channel("unix://" + socket)
        self.addCleanup(channel.close)
        self.client = services.SnapshotMetadataStub(channel)
        self.request = csi.GetMetadataDeltaRequest(base_snapshot_id="disk-1", target_snapshot_id="disk-2")

    def stop(self):
        self.mock.terminate()
        self.mock.wait()
        self.mock.stdout.close()

    def test_delta(self):
        messages = list(self.client.GetMetadataDelta(self.request))
        self.assertEqual(sum(len(message.block_metadata) for message in messages), 50000)

    def test_cut(self):
        # This one call meets a fault.
        marker = [("cbt-lab-fault", "cut:after=3,code=UNAVAILABLE")]
        blocks = 0
        with self.assertRaises(grpc.RpcError) as raised:
            for message in self.client.GetMetadataDelta(self.request, metadata=marker):
                blocks += len(message.block_metadata)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertEqual(blocks, 3 * 1024)


if __name__ == "__main__":
    unittest.main()
