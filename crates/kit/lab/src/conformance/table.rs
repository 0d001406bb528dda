//! The one table of cases, in the order they are reported: what the CSI spec demands in its section "Snapshot
//! Metadata Service RPCs", and the test of each demand.

use super::case::{Case, Level};
use super::fixtures::{Fixtures, Need};
use super::subject::Kind::{Allocated, Delta};
use super::{complete, errors, format, life, meanwhile, offsets, streams};
use Level::{Must, Should};

const OVERVIEW: &str = "Snapshot Metadata Service RPCs";
const FORMAT: &str = "Metadata Format";
const STREAM: &str = "Special considerations for processing a snapshot metadata gRPC stream";
const ALLOCATED: &str = "GetMetadataAllocated";
const DELTA: &str = "GetMetadataDelta";
const ALLOCATED_ERRORS: &str = "GetMetadataAllocated Errors";
const DELTA_ERRORS: &str = "GetMetadataDelta Errors";

const NONE: &[Need] = &[];
const PAIR: &[Need] = &[Need::Pair];
const RESTORED: &[Need] = &[Need::Pair, Need::Restored];
const EXPANDED: &[Need] = &[Need::Pair, Need::Expanded];
const BETWEEN: &[Need] = &[Need::Pair, Need::Between];
const DENSE: &[Need] = &[Need::Pair, Need::Dense];
const CALLS: &[Need] = &[Need::Pair, Need::PairCalls];
const DENSE_CALLS: &[Need] =
    &[Need::Pair, Need::Dense, Need::Held(Allocated), Need::Held(Delta), Need::DenseCalls];
const ALONE: &[Need] = &[Need::Pair, Need::Alone];
const LAST: &[Need] = &[Need::Alone];

/// A requirement on each stream, `function(fixtures, kind)`, or on one, `function(fixtures)`: name, level, sections, needs,
/// function and requirement.
macro_rules! case {
    (both $name:literal $level:ident $sections:ident $needs:ident $test:path, $requirement:literal) => {
        vec![
            Case::of(concat!("allocated-", $name), $level, $sections[0], $requirement, $needs, |fixtures| {
                Box::pin($test(fixtures, Allocated))
            }),
            Case::of(concat!("delta-", $name), $level, $sections[1], $requirement, $needs, |fixtures| {
                Box::pin($test(fixtures, Delta))
            }),
        ]
    };
    (one $name:literal $level:ident $section:ident $needs:ident $test:path, $requirement:literal) => {
        vec![Case::of($name, $level, $section, $requirement, $needs, |fixtures| Box::pin($test(fixtures)))]
    };
}

macro_rules! cases {
    ($($streams:ident $name:literal $level:ident $sections:ident $needs:ident $test:path => $requirement:literal;)*) => {
        [$(case!($streams $name $level $sections $needs $test, $requirement)),*].into_iter().flatten().collect()
    };
}

pub(super) fn cases() -> Vec<Case<Fixtures>> {
    const RPCS: [&str; 2] = [ALLOCATED, DELTA];
    const FORMATS: [&str; 2] = [FORMAT; 2];
    const STREAMS: [&str; 2] = [STREAM; 2];
    const ERRORS: [&str; 2] = [ALLOCATED_ERRORS, DELTA_ERRORS];
    cases! {
        one "service-claimed" Must OVERVIEW NONE errors::claimed =>
            "a plugin that serves SnapshotMetadata lists SNAPSHOT_METADATA_SERVICE among its capabilities";
        both "served" Must RPCS PAIR errors::served => "a plugin with the service implements the RPC";
        both "order" Must RPCS PAIR format::order =>
            "byte_offset strictly increases, in a message and from one to the next";
        both "overlap" Must RPCS PAIR format::overlap =>
            "no tuple starts before the one before it ends, also across messages";
        both "positive-size" Must FORMATS PAIR format::positive =>
            "byte_offset counts from zero and size_bytes is greater than zero";
        both "inside" Must FORMATS PAIR format::inside =>
            "a tuple names a range of the volume, so it ends at its capacity at the latest";
        both "type-known" Must RPCS PAIR format::style_known =>
            "block_metadata_type is FIXED_LENGTH or VARIABLE_LENGTH";
        both "type-constant" Must RPCS PAIR format::style_constant =>
            "block_metadata_type is the same in all messages of a stream";
        both "fixed-size" Must RPCS PAIR format::fixed_size => "with FIXED_LENGTH all tuples have one size";
        both "capacity-constant" Must RPCS PAIR format::capacity_constant =>
            "volume_capacity_bytes is the same in all messages of a stream";
        both "capacity" Must RPCS PAIR format::capacity_value =>
            "volume_capacity_bytes is the capacity of the volume";
        both "max-results" Must RPCS PAIR format::max_results =>
            "a message has at most max_results tuples, whatever the bound, and the answer stays the same";
        both "first-tuple" Must RPCS PAIR offsets::first_tuple =>
            "no tuple ends at or before starting_offset, wherever that lies";
        both "offset-complete" Must STREAMS PAIR offsets::complete =>
            "starting_offset is part of the computation: nothing after it is lost";
        both "resume" Must STREAMS PAIR offsets::resume =>
            "a stream that was cut is continued at the byte after the last tuple, whichever that was";
        one "delta-offset-partial" Must STREAM NONE offsets::partial =>
            "a change of a few bytes, at the start or the end of a block, is listed from any offset before it";
        both "offset-at-capacity" Should ERRORS PAIR offsets::at_capacity =>
            "an offset equal to the capacity does not exceed it: OK, without tuples";
        both "offset-beyond" Must ERRORS PAIR offsets::beyond =>
            "an offset that exceeds the volume is OUT_OF_RANGE";
        both "offset-negative" Must ERRORS PAIR offsets::negative => "a negative offset is OUT_OF_RANGE";
        both "id-missing" Must ERRORS PAIR errors::missing_id => "a missing id is INVALID_ARGUMENT";
        both "id-unknown" Must ERRORS PAIR errors::unknown_id => "an id of no snapshot is NOT_FOUND";
        both "id-deleted" Must ERRORS CALLS errors::deleted_id => "a deleted snapshot's id is NOT_FOUND";
        both "max-results-negative" Must ERRORS PAIR errors::negative_bound =>
            "a negative max_results is an invalid argument: refused, or taken for none";
        one "delta-reversed" Must DELTA PAIR errors::reversed =>
            "the target was created after the base; the other way round is an invalid argument";
        one "delta-other-volume" Must DELTA PAIR errors::other_volume =>
            "base and target are snapshots of one volume; of two, they are an invalid argument";
        one "delta-same-snapshot" Should DELTA PAIR errors::same_snapshot =>
            "a snapshot as its own target is refused as invalid, or has no changes";
        one "allocated-complete" Must STREAM PAIR complete::written =>
            "the stream ends with OK only after all that was written is in its tuples";
        one "allocated-full-backup" Must ALLOCATED RESTORED complete::full_backup =>
            "the tuples hold all valid data: a restored volume has none outside of them";
        one "allocated-never-written" Should ALLOCATED PAIR complete::never_written =>
            "a snapshot of a volume that was never written has no allocated ranges, and a capacity";
        one "delta-complete" Must STREAM PAIR complete::changed =>
            "the stream ends with OK only after all that changed is in its tuples";
        one "delta-incremental-backup" Must DELTA RESTORED complete::incremental_backup =>
            "the tuples hold all changes: outside of them base and target, restored, are equal";
        one "delta-discarded" Must DELTA PAIR complete::discarded => "data that was discarded has changed";
        one "delta-zeroed" Must DELTA PAIR complete::zeroed =>
            "data that was overwritten with zeros has changed";
        one "delta-new-data" Must DELTA PAIR complete::new_data =>
            "a range that was written for the first time has changed";
        one "delta-across" Must DELTA PAIR complete::across =>
            "base and target need not be neighbours: changes over a snapshot between them are all there";
        one "delta-unchanged" Should DELTA CALLS complete::unchanged =>
            "two snapshots without a write between them differ in nothing";
        one "written-on" Must OVERVIEW PAIR life::written_on =>
            "the answers are about snapshots: writes to the volume after them change nothing";
        one "expanded-old-snapshot" Must ALLOCATED EXPANDED life::old_capacity =>
            "a snapshot from before an expansion keeps its capacity and its ranges";
        one "expanded-capacity" Must DELTA EXPANDED life::new_capacity =>
            "after an expansion the capacity is that of the target snapshot";
        one "expanded-delta" Must DELTA EXPANDED life::grown =>
            "what was written to the new part of an expanded volume has changed";
        one "expanded-resume" Must STREAM EXPANDED offsets::resume_expanded =>
            "a stream over an expansion that was cut is continued at the byte after the last tuple, whichever that was";
        one "restored-between" Must DELTA BETWEEN life::restored_between =>
            "a restore from the base, written to or not, takes no change out of the delta";
        one "cloned-between" Must DELTA NONE life::cloned_between =>
            "a clone of the volume, written to, takes no change out of the delta";
        one "restored-snapshot" Must ALLOCATED BETWEEN life::of_restored =>
            "what a volume was restored with is its data: its snapshots list it";
        one "source-deleted" Must OVERVIEW PAIR life::source_deleted =>
            "a snapshot outlives its volume: the answers stay the same";
        one "middle-deleted" Must DELTA PAIR life::middle_deleted =>
            "a snapshot that was deleted between base and target takes no change with it";
        one "base-deleted" Must DELTA_ERRORS PAIR life::base_deleted =>
            "a deleted base is NOT_FOUND, or still answered in full";
        one "base-deleted-again" Must DELTA_ERRORS PAIR life::base_deleted_again =>
            "a second delta from a deleted base, also with an offset, has the same result as the first";
        one "tail" Must ALLOCATED NONE life::tail =>
            "if the size of a volume is not a multiple of usual blocks, the last bytes are listed, and no other capacity";
        one "group-members" Must DELTA NONE life::group_members =>
            "snapshots of a group are base and target as any others";
        one "filesystem-volume" Should OVERVIEW NONE life::filesystem =>
            "the service is for block volumes; a volume with a filesystem may be one below";
        both "deadline" Must STREAMS DENSE streams::deadline =>
            "a stream that its deadline cut never ends with OK";
        both "cancel" Must STREAMS DENSE streams::cancel =>
            "a client that is gone ends its own stream and no other";
        both "slow-reader" Must STREAMS DENSE streams::slow_reader =>
            "a stream whose client reads slowly, and stops for a while, is whole";
        both "many" Must STREAMS DENSE streams::many =>
            "a million ranges are all listed, in messages that a client takes (4 MiB), whatever max_results";
        one "modified-between" Must DELTA DENSE_CALLS meanwhile::modified =>
            "a volume that is modified (VolumeAttributesClass), also while it is streamed, loses no change and no answer";
        both "deleted-meanwhile" Must STREAMS DENSE_CALLS meanwhile::deleted =>
            "a snapshot deleted while it is streamed: all of it, or an error";
        one "expanded-meanwhile" Must STREAM DENSE_CALLS meanwhile::expanded =>
            "a volume that is expanded while its snapshots are streamed: no range is lost, and the capacity stays theirs";
        one "cloned-meanwhile" Must STREAM DENSE_CALLS meanwhile::cloned =>
            "a volume that is cloned while its snapshots are streamed: no range is lost";
        one "restored-volume-read" Must STREAM RESTORED streams::while_read =>
            "streams are whole while a volume restored from the snapshot is read";
        both "concurrent" Must STREAMS ALONE streams::beside => "each of many streams at once is whole";
        one "alive" Must STREAM LAST streams::alive =>
            "the plugin answers after all cut, refused and parallel streams";
    }
}
