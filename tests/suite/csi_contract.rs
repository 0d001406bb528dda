//! The driver's messages are exactly those of CSI v1, with the same names and numbers.
//!
//! `csi_contract.txt` lists every service, call, message, field and enum value of the published interface. These tests turn
//! the descriptor that is compiled into the driver into the same lines and compare the two. So they detect any edit of
//! `proto/csi.proto` that changes the interface. The mark on secret fields is included, since it decides what
//! is kept out of logs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use prost_reflect::{DescriptorPool, FieldDescriptor, FileDescriptor, MethodDescriptor, Value};
use proto::FILE_DESCRIPTOR_SET;

const PACKAGE: &str = "csi.v1";
const TABLE: &str = include_str!("csi_contract.txt");

/// The lines of each block by the block's first line, such as `message csi.v1.Topology`.
///
/// These are sets, since the order of declarations makes no difference to clients.
#[derive(Default)]
struct Contract(BTreeMap<String, BTreeSet<String>>);

impl Contract {
    /// Reads a table. A line in column one opens a block; `#` starts a comment line.
    fn parse(table: &str) -> Self {
        let mut contract = Self::default();
        let mut block: Option<&mut BTreeSet<String>> = None;
        let lines = table.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        for line in lines {
            if line.starts_with(' ') {
                let block = block.as_mut().unwrap_or_else(|| panic!("{line:?} stands before any block"));
                assert!(block.insert(line.trim().to_owned()), "{line:?} stands twice in one block");
            } else {
                assert!(!contract.0.contains_key(line), "{line:?} opens two blocks of the table");
                block = Some(contract.0.entry(line.to_owned()).or_default());
            }
        }
        contract
    }

    /// Writes out everything that [`PACKAGE`] declares in an encoded `FileDescriptorSet`.
    fn of_descriptor_set(encoded: &[u8]) -> Self {
        let pool = DescriptorPool::decode(encoded)
            .expect("the compiled-in descriptor set decodes and holds its imports");
        let ours = |file: &FileDescriptor| file.package_name() == PACKAGE;
        let mut contract = Self::default();

        for file in pool.files().filter(|file| ours(file)) {
            contract.block(format!("package {PACKAGE}"), [format!("syntax {:?}", file.syntax())]);
        }
        for extension in pool.all_extensions().filter(|e| ours(&e.parent_file())) {
            let (number, kind) = (extension.number(), extension.kind());
            contract.block(
                format!("extend {}", extension.containing_message().full_name()),
                [format!("{number} {kind:?} {}", extension.full_name())],
            );
        }
        for service in pool.services().filter(|s| ours(&s.parent_file())) {
            contract.block(
                format!("service {}", service.full_name()),
                service.methods().map(|method| rpc_line(&method)),
            );
        }
        for enumeration in pool.all_enums().filter(|e| ours(&e.parent_file())) {
            contract.block(
                format!("enum {}", enumeration.full_name()),
                enumeration.values().map(|value| format!("{} {}", value.number(), value.name())).chain(
                    // Inclusive at both ends, unlike the range of a message.
                    enumeration.reserved_ranges().flatten().map(|number| format!("reserved {number}")),
                ),
            );
        }
        // A map field declares a hidden entry message; the field's own line says what the map holds.
        let messages = pool.all_messages().filter(|m| ours(&m.parent_file()) && !m.is_map_entry());
        for message in messages {
            contract.block(
                format!("message {}", message.full_name()),
                message
                    .fields()
                    .map(|field| field_line(&field))
                    .chain(message.reserved_ranges().flatten().map(|number| format!("reserved {number}"))),
            );
        }
        contract
    }

    /// Adds a block, even if it has no lines.
    fn block(&mut self, header: String, lines: impl IntoIterator<Item = String>) {
        self.0.entry(header).or_default().extend(lines);
    }

    /// The lines that `found` lacks (`-`) and those that only `found` has (`+`), by block. Empty if the two agree.
    fn diff(&self, found: &Self) -> String {
        let nothing = BTreeSet::new();
        let headers: BTreeSet<_> = self.0.keys().chain(found.0.keys()).collect();
        let mut diff = String::new();
        for header in headers {
            let (wanted, got) = (self.0.get(header), found.0.get(header));
            if wanted == got {
                continue;
            }
            let sign = match (wanted, got) {
                (_, None) => '-',
                (None, _) => '+',
                (Some(_), Some(_)) => ' ',
            };
            let (wanted, got) = (wanted.unwrap_or(&nothing), got.unwrap_or(&nothing));
            let missing = wanted.difference(got).map(|line| format!("-   {line}\n"));
            let unexpected = got.difference(wanted).map(|line| format!("+   {line}\n"));
            writeln!(diff, "{sign} {header}").expect("writing to a string cannot fail");
            diff.extend(missing.chain(unexpected));
        }
        diff
    }
}

/// `rpc NAME REQUEST -> RESPONSE`, with `stream` before a message type that is streamed.
fn rpc_line(method: &MethodDescriptor) -> String {
    let side = |streams: bool| if streams { "stream " } else { "" };
    format!(
        "rpc {} {}{} -> {}{}",
        method.name(),
        side(method.is_client_streaming()),
        method.input().full_name(),
        side(method.is_server_streaming()),
        method.output().full_name(),
    )
}

/// `NUMBER [repeated|optional] TYPE NAME [oneof ONEOF] [[option]]`; the options are the contract's own extensions.
fn field_line(field: &FieldDescriptor) -> String {
    let kind = field.kind();
    let typed = match kind.as_message() {
        Some(entry) if field.is_map() => format!(
            "map<{:?}, {:?}>",
            entry.map_entry_key_field().kind(),
            entry.map_entry_value_field().kind(),
        ),
        _ if field.is_list() => format!("repeated {kind:?}"),
        _ if field.field_descriptor_proto().proto3_optional() => format!("optional {kind:?}"),
        _ => format!("{kind:?}"),
    };
    let oneof = field
        .containing_oneof()
        .filter(|oneof| !oneof.is_synthetic())
        .map(|oneof| format!(" oneof {}", oneof.name()))
        .unwrap_or_default();
    let options = field.options();
    let marks: String = options
        .extensions()
        .map(|(extension, value)| match value {
            Value::Bool(true) => format!(" [{}]", extension.name()),
            other => format!(" [{} = {other}]", extension.name()),
        })
        .collect();
    format!("{} {typed} {}{oneof}{marks}", field.number(), field.name())
}

#[test]
fn the_compiled_proto_is_csi_v1() {
    let diff = Contract::parse(TABLE).diff(&Contract::of_descriptor_set(FILE_DESCRIPTOR_SET));
    assert!(diff.is_empty(), "proto/csi.proto is not CSI v1 (- belongs there, + does not):\n{diff}");
}

#[test]
fn a_difference_is_named_with_its_block() {
    let wanted = Contract::parse(
        "message M\n  1 string a\n  2 int64 b\nmessage Same\n  1 bool c\nenum Gone\n  0 NONE\n",
    );
    let found =
        Contract::parse("message M\n  1 string a\n  3 int64 b\nmessage Same\n  1 bool c\nmessage New\n");
    assert_eq!(
        wanted.diff(&found),
        "- enum Gone\n-   0 NONE\n  message M\n-   2 int64 b\n+   3 int64 b\n+ message New\n"
    );
    assert_eq!(wanted.diff(&wanted), "");
}

/// The gateway may relay the driver's messages as bytes, because both contracts have the same fields in them.
#[test]
fn the_kubernetes_api_has_the_same_answers_under_the_same_numbers() {
    let csi = DescriptorPool::decode(FILE_DESCRIPTOR_SET).expect("CSI");
    let kubernetes =
        DescriptorPool::decode(proto::kubernetes::FILE_DESCRIPTOR_SET).expect("the Kubernetes API");
    let fields = |pool: &DescriptorPool, package: &str, message: &str| -> BTreeSet<String> {
        let message = pool.get_message_by_name(&format!("{package}.{message}")).expect(message);
        message.fields().map(|field| field_line(&field).replace(&format!("{package}."), "")).collect()
    };
    for message in ["GetMetadataAllocatedResponse", "GetMetadataDeltaResponse", "BlockMetadata"] {
        let (ours, theirs) =
            (fields(&kubernetes, "snapshotmetadata", message), fields(&csi, PACKAGE, message));
        assert!(!ours.is_empty() && ours == theirs, "{message}: {ours:?}, in CSI {theirs:?}");
    }
    let values = |pool: &DescriptorPool, name: &str| -> BTreeSet<(i32, String)> {
        let kind = pool.get_enum_by_name(name).expect(name);
        kind.values().map(|value| (value.number(), value.name().to_owned())).collect()
    };
    let (ours, theirs) =
        (values(&kubernetes, "snapshotmetadata.BlockMetadataType"), values(&csi, "csi.v1.BlockMetadataType"));
    assert_eq!(ours, theirs);
}
