"""Copies a snapshot in full, then only the blocks that the next one changed. Usage: first_delta.py SOCKET DIRECTORY"""

import os
import sys

import grpc

csi, services = grpc.protos_and_services("csi.proto")
socket, directory = sys.argv[1], os.path.abspath(sys.argv[2])
channel = grpc.insecure_channel("unix://" + socket)
controller, node = services.ControllerStub(channel), services.NodeStub(channel)
metadata = services.SnapshotMetadataStub(channel)
block = csi.VolumeCapability(block={}, access_mode={"mode": "SINGLE_NODE_WRITER"})
RETRY = [grpc.StatusCode[name] for name in ("UNAVAILABLE", "INTERNAL", "ABORTED", "DEADLINE_EXCEEDED")]


def ranges(call, request):
    """Yields (offset, size) of each range. It returns only where the driver ended the answer with OK."""
    kind, retries = None, 5
    while True:
        try:
            for message in call(request, timeout=60):
                kind = kind or message.block_metadata_type
                if message.block_metadata_type != kind or kind not in (csi.FIXED_LENGTH, csi.VARIABLE_LENGTH):
                    raise ValueError(f"block_metadata_type {message.block_metadata_type}")
                for found in message.block_metadata:
                    yield found.byte_offset, found.size_bytes
                    # A cut answer continues at the byte after the last range.
                    request.starting_offset = found.byte_offset + found.size_bytes
                    retries = 5
            return
        except grpc.RpcError as error:
            retries -= 1
            if error.code() not in RETRY or retries < 0:
                raise
            print(f"{error.code().name}: continues at byte {request.starting_offset}")


def create(name, **source):
    return controller.CreateVolume(csi.CreateVolumeRequest(
        name=name, capacity_range={"required_bytes": 64 << 20}, volume_capabilities=[block], **source)).volume


def copy(snapshot_id, listed, backup):
    """Copies what is listed of a snapshot, then compares all. Its bytes are those of a volume made from it."""
    volume = create("of-" + snapshot_id, volume_content_source={"snapshot": {"snapshot_id": snapshot_id}})
    path = os.path.join(directory, volume.volume_id)
    node.NodePublishVolume(csi.NodePublishVolumeRequest(
        volume_id=volume.volume_id, target_path=path, volume_capability=block))
    total = 0
    with open(path, "rb") as source, open(backup, "r+b") as target:
        target.truncate(volume.capacity_bytes)
        for offset, size in listed:
            source.seek(offset)
            target.seek(offset)
            total += target.write(source.read(size))
    same = open(path, "rb").read() == open(backup, "rb").read()
    print(f"{snapshot_id}: {total} bytes copied, the backup is {'the same' if same else 'DIFFERENT'}")
    return same


disk = create("disk")
monday, tuesday = [controller.CreateSnapshot(csi.CreateSnapshotRequest(
    source_volume_id=disk.volume_id, name=name)).snapshot.snapshot_id for name in ("monday", "tuesday")]
backup = os.path.join(directory, "backup.img")
open(backup, "wb").close()
full = csi.GetMetadataAllocatedRequest(snapshot_id=monday)
delta = csi.GetMetadataDeltaRequest(base_snapshot_id=monday, target_snapshot_id=tuesday)
is_whole = copy(monday, ranges(metadata.GetMetadataAllocated, full), backup)
is_whole &= copy(tuesday, ranges(metadata.GetMetadataDelta, delta), backup)
sys.exit(not is_whole)
