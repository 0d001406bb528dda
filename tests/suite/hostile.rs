//! Hostile requests: strange ids, random fields, random bytes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use csi_client::delta_of;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRng, TestRunner};
use prost_reflect::prost::Message;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};
use proto::FILE_DESCRIPTOR_SET;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use testkit::paths_below;
use testkit::prelude::*;

/// Ids of no object, in all shapes.
fn hostile_ids() -> Vec<String> {
    vec![
        "..".into(),
        "/".into(),
        "../volumes".into(),
        "vol-../../../../etc".into(),
        "vol-00000000000000000000000000000000".into(),
        "snap-00000000000000000000000000000000".into(),
        "group-00000000000000000000000000000000".into(),
        "VOL-00000000000000000000000000000000".into(),
        "vol-0000000000000000000000000000000\0".into(),
        "\0".into(),
        "\u{202e}gpj".into(),
        "x".repeat(10_000),
        "%s%n{}$(reboot)`reboot`".into(),
        "'; drop table volumes; --".into(),
    ]
}

#[apply(device_test)]
async fn an_id_that_names_nothing_gets_the_specs_answer() {
    let mut rig = Rig::start_with(PoolKind::Dir, &["--enable-attach"], "info").await;
    let staging = rig.dir.path().join("staging");
    std::fs::create_dir(&staging).expect("mkdir");
    let path = staging.display().to_string();
    let target = rig.dir.path().join("target").display().to_string();
    let volume = rig.volume("real", MIB, block_capability()).await;
    let real = rig.snapshot("real", &volume).await;
    for id in hostile_ids() {
        let (controller, node) = (&mut rig.client.controller, &mut rig.client.node);
        macro_rules! answers {
            ($($code:ident: $client:ident.$method:ident($request:expr);)*) => {$(
                let answer = $client.$method($request).await;
                let code = answer.map_or_else(|status| status.code(), |_| Code::Ok);
                assert_eq!(code, Code::$code, "{} of {:.40?}", stringify!($method), id);
            )*};
        }
        // Deleting an unknown object succeeds.
        answers! {
            Ok: controller.delete_volume(proto::DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() });
            Ok: controller.delete_snapshot(
                proto::DeleteSnapshotRequest { snapshot_id: id.clone(), ..Default::default() }
            );
            Ok: controller.controller_unpublish_volume(requests::detach(&id, "node-1"));
            Ok: node.node_unpublish_volume(requests::unpublish(&id, &target));
            Ok: node.node_unstage_volume(requests::unstage(&id, &path));
        }
        // A filter without a match lists nothing.
        for (source_volume_id, snapshot_id) in [(id.clone(), String::new()), (String::new(), id.clone())] {
            let request = proto::ListSnapshotsRequest { source_volume_id, snapshot_id, ..Default::default() };
            let list = controller.list_snapshots(request).await.expect("list").into_inner();
            assert!(list.entries.is_empty() && list.next_token.is_empty());
        }
        let mut expand = proto::ControllerExpandVolumeRequest { volume_id: id.clone(), ..Default::default() };
        expand.capacity_range = Some(proto::CapacityRange { required_bytes: MIB, limit_bytes: 0 });
        let publish = requests::publish(&id, &path, &target, block_capability());
        answers! {
            NotFound: controller.get_snapshot(requests::snapshot(&id));
            NotFound: controller.controller_get_volume(proto::ControllerGetVolumeRequest { volume_id: id.clone() });
            NotFound: controller.controller_get_volume_health(requests::health(&id));
            NotFound: controller.controller_expand_volume(expand);
            NotFound: controller.controller_modify_volume(requests::modify(&id, &[("directIO", "true")]));
            NotFound: controller.controller_publish_volume(requests::attach(&id, "node-1"));
            NotFound: controller.controller_publish_volume(requests::attach(&volume, &id));
            NotFound: controller.validate_volume_capabilities(requests::validate(&id, vec![block_capability()]));
            NotFound: controller.create_snapshot(proto::CreateSnapshotRequest {
                name: "of nothing".into(), source_volume_id: id.clone(), ..Default::default()
            });
            NotFound: node.node_stage_volume(stage_of(&id, &staging, block_capability()));
            NotFound: node.node_publish_volume(publish);
            NotFound: node.node_get_volume_stats(requests::stats(&id, &path));
            NotFound: node.node_get_volume_health(
                proto::NodeGetVolumeHealthRequest { volume_id: id.clone(), ..Default::default() }
            );
            NotFound: node.node_expand_volume(requests::node_expand(&id, &path));
        }
        let (groups, metadata) = (&mut rig.client.groups, &mut rig.client.metadata);
        answers! {
            Ok: groups.delete_volume_group_snapshot(proto::DeleteVolumeGroupSnapshotRequest {
                group_snapshot_id: id.clone(), snapshot_ids: vec![id.clone()], ..Default::default()
            });
            NotFound: groups.get_volume_group_snapshot(
                proto::GetVolumeGroupSnapshotRequest { group_snapshot_id: id.clone(), ..Default::default() }
            );
            NotFound: groups.create_volume_group_snapshot(proto::CreateVolumeGroupSnapshotRequest {
                name: "of nothing".into(), source_volume_ids: vec![volume.clone(), id.clone()], ..Default::default()
            });
            NotFound: metadata.get_metadata_allocated(
                proto::GetMetadataAllocatedRequest { snapshot_id: id.clone(), ..Default::default() }
            );
            NotFound: metadata.get_metadata_delta(delta_of(&id, &real));
            NotFound: metadata.get_metadata_delta(delta_of(&real, &id));
        }
        for source in [from_snapshot(&id), from_volume(&id)] {
            let request = new_volume_from("from nothing", MIB, block_capability(), source);
            assert_eq!(code(rig.client.controller.create_volume(request).await), Code::NotFound);
        }
    }
    assert!(!Path::new(&target).exists());
    rig.finish();
}

/// Sends raw bytes, and accepts any answer.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = tonic::Status;

    fn encode(&mut self, item: Vec<u8>, target: &mut EncodeBuf<'_>) -> Result<(), tonic::Status> {
        use prost_reflect::bytes::BufMut;
        target.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = tonic::Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, tonic::Status> {
        use prost_reflect::bytes::Buf;
        let length = source.remaining();
        Ok(Some(source.copy_to_bytes(length).to_vec()))
    }
}

/// The codes that a call may return: those of the spec's general scheme (INVALID_ARGUMENT, ABORTED) and of the call's table.
/// FAILED_PRECONDITION is added where the spec has no code: if no consistent copy of a Block volume can be made
/// (CreateSnapshot, CreateVolume from a volume), and if a volume to unstage is still published.
pub fn allowed(method: &str, code: Code) -> bool {
    use Code::{
        Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Ok, OutOfRange,
        ResourceExhausted,
    };
    let own: &[Code] = match method {
        "CreateVolume" => &[NotFound, AlreadyExists, ResourceExhausted, OutOfRange, FailedPrecondition],
        "DeleteVolume" => &[FailedPrecondition],
        "ControllerPublishVolume" => &[NotFound, AlreadyExists, FailedPrecondition, ResourceExhausted],
        "ControllerUnpublishVolume" | "ValidateVolumeCapabilities" | "ControllerGetVolume" => &[NotFound],
        "ControllerGetVolumeHealth" | "NodeGetVolumeHealth" => &[NotFound],
        "ControllerModifyVolume" | "GetSnapshot" | "NodeUnpublishVolume" | "NodeGetVolumeStats" => {
            &[NotFound]
        }
        "CreateSnapshot" => &[NotFound, AlreadyExists, ResourceExhausted, FailedPrecondition],
        "DeleteSnapshot" | "DeleteVolumeGroupSnapshot" => &[FailedPrecondition],
        "ControllerExpandVolume" | "NodeExpandVolume" => &[NotFound, FailedPrecondition, OutOfRange],
        "NodeStageVolume" | "NodePublishVolume" => &[NotFound, AlreadyExists, FailedPrecondition, OutOfRange],
        "NodeUnstageVolume" => &[NotFound, FailedPrecondition],
        "CreateVolumeGroupSnapshot" => &[NotFound, AlreadyExists, ResourceExhausted, FailedPrecondition],
        "GetVolumeGroupSnapshot" => &[NotFound],
        "GetMetadataAllocated" | "GetMetadataDelta" => &[NotFound, FailedPrecondition, OutOfRange],
        _ => &[],
    };
    matches!(code, Ok | InvalidArgument | Aborted) || own.contains(&code)
}

/// Random values for any field of any message.
struct Fuzz<'f> {
    rng: &'f mut TestRng,
    words: &'f [String],
}

impl Fuzz<'_> {
    fn below(&mut self, most: usize) -> usize {
        (self.rng.next_u64() % most as u64) as usize
    }

    fn word(&mut self) -> String {
        let at = self.below(self.words.len());
        self.words[at].clone()
    }

    fn number(&mut self) -> i64 {
        const NUMBERS: [i64; 12] =
            [0, 1, -1, 4095, 4096, MIB, i32::MAX as i64, i32::MIN as i64, i64::MAX, i64::MIN, 1 << 40, -4096];
        NUMBERS[self.below(NUMBERS.len())]
    }

    fn value(&mut self, kind: &Kind, depth: usize) -> Value {
        match kind {
            Kind::String => Value::String(self.word()),
            Kind::Bool => Value::Bool(self.below(2) == 1),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(self.number() as i32),
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(self.number()),
            Kind::Uint32 | Kind::Fixed32 => Value::U32(self.number() as u32),
            Kind::Uint64 | Kind::Fixed64 => Value::U64(self.number() as u64),
            Kind::Double => Value::F64(self.number() as f64),
            Kind::Float => Value::F32(self.number() as f32),
            Kind::Bytes => Value::Bytes(self.word().into_bytes().into()),
            Kind::Enum(_) => Value::EnumNumber(self.below(20) as i32 - 2),
            Kind::Message(message) => Value::Message(self.message(message, depth + 1)),
        }
    }

    fn field(&mut self, field: &FieldDescriptor, depth: usize) -> Value {
        if field.is_map() {
            let entry = field.kind();
            let Kind::Message(entry) = &entry else { unreachable!("a map's entry is a message") };
            let value = entry.map_entry_value_field().kind();
            let pairs = (0..self.below(4)).map(|_| (MapKey::String(self.word()), self.value(&value, depth)));
            return Value::Map(pairs.collect());
        }
        if field.is_list() {
            return Value::List((0..self.below(4)).map(|_| self.value(&field.kind(), depth)).collect());
        }
        self.value(&field.kind(), depth)
    }

    fn message(&mut self, descriptor: &MessageDescriptor, depth: usize) -> DynamicMessage {
        let mut message = DynamicMessage::new(descriptor.clone());
        for field in descriptor.fields() {
            // Most fields are set, so that requests pass the first checks.
            if depth < 6 && self.below(8) > 0 {
                let value = self.field(&field, depth);
                message.set_field(&field, value);
            }
        }
        message
    }
}

/// All files below a directory, with their content.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let content =
        |path: &PathBuf| if path.is_dir() { Vec::new() } else { std::fs::read(path).expect("read") };
    paths_below(dir).into_iter().map(|path| (path.clone(), content(&path))).collect()
}

/// Random requests, and random bytes, to every call of every service. The driver keeps running, returns only codes of the
/// spec, and changes nothing outside its data directory.
#[test_with::root]
#[test]
fn fuzzed_requests_get_the_specs_codes_and_touch_nothing() {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let mut rig = runtime.block_on(Rig::start_with(PoolKind::Dir, &["--enable-attach"], "warn"));
    let canary = rig.dir.path().join("canary");
    std::fs::create_dir_all(canary.join("dir")).expect("mkdir");
    std::fs::write(canary.join("file"), "untouched").expect("write");
    std::os::unix::fs::symlink(canary.join("file"), canary.join("link")).expect("symlink");
    let mut words = hostile_ids();
    runtime.block_on(async {
        for (name, capability) in [("block", block_capability()), ("mount", mount_capability("ext4"))] {
            let volume = rig.volume(name, MIB, capability).await;
            let snapshot = rig.snapshot(name, &volume).await;
            words.extend([volume, snapshot]);
        }
    });
    // None of these paths can be staged or published at: a file, a link, and a path that does not exist.
    let paths =
        ["canary/file", "canary/link", "canary/../canary/file", "canary/dir/missing/target", "no/such"];
    words.extend(paths.map(|path| rig.dir.path().join(path).display().to_string()));
    words.extend(
        ["", "node-1", "ext4", "xfs", "ro", "true", "false", "4Ki", "size", "directIO", "readAheadKiB"]
            .map(String::from),
    );
    words.extend(
        ["blockSize", "csi.storage.k8s.io/ephemeral", "blockMetadataType", "fixed", "1Mi"].map(String::from),
    );

    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).expect("the descriptors");
    let methods: Vec<_> = pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()).collect();
    assert!(methods.len() > 30, "{} methods", methods.len());
    let before = tree(&canary);
    let rng_seed = RngSeed::Fixed(testkit::seed("hostile calls"));
    let mut runner = TestRunner::new(Config { rng_seed, ..Config::default() });
    let mut fuzz = Fuzz { rng: runner.rng(), words: &words };
    let mut codes: BTreeMap<(String, String), usize> = BTreeMap::new();
    let channel = runtime.block_on(testkit::channel(&rig.socket()));
    for round in 0..6000 {
        let method = &methods[round % methods.len()];
        let mut bytes = fuzz.message(&method.input(), 0).encode_to_vec();
        let malformed = fuzz.below(10) == 0;
        if malformed {
            for _ in 0..=fuzz.below(8) {
                let length = bytes.len();
                match fuzz.below(3) {
                    0 if length > 0 => bytes.truncate(fuzz.below(length)),
                    1 if length > 0 => {
                        let at = fuzz.below(length);
                        bytes[at] = fuzz.below(256) as u8;
                    }
                    _ => bytes.push(fuzz.below(256) as u8),
                }
            }
        }
        let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
        let code = runtime.block_on(async {
            let mut grpc = tonic::client::Grpc::new(channel.clone());
            grpc.ready().await.expect("the driver lives");
            let path = path.parse().expect("a path");
            let answer = grpc.server_streaming(tonic::Request::new(bytes), path, Raw).await;
            match answer {
                Err(status) => status.code(),
                Ok(stream) => {
                    let mut stream = stream.into_inner();
                    loop {
                        match stream.message().await {
                            Ok(Some(_)) => {}
                            Ok(None) => break Code::Ok,
                            Err(status) => break status.code(),
                        }
                    }
                }
            }
        });
        let fits = allowed(method.name(), code) || (malformed && code == Code::Internal);
        assert!(fits, "{path} answered {code:?}\n{}", rig.log());
        *codes.entry((method.name().to_owned(), format!("{code:?}"))).or_default() += 1;
    }
    println!("{codes:#?}");
    let after = tree(&canary);
    assert_eq!(before, after, "something outside the data directory was touched");
    assert!(!rig.log().contains("panicked"), "{}", rig.log());
    let reached = codes.iter().filter(|((_, code), _)| code == "Ok").count();
    assert!(reached > 15, "only {reached} methods were ever reached: the requests are too wild");
    runtime.block_on(async {
        rig.client.identity.probe(proto::ProbeRequest {}).await.expect("the driver lives");
    });
    rig.finish();
}
