//! The one table of cases, in the order they are reported: what the CSI spec demands in its section "Snapshot
//! Metadata Service RPCs", and the test of each demand.

use super::case::{Case, Level};
use super::fixtures::Kind::{Allocated, Delta};
use super::fixtures::{Fixtures, Need};
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

/// `both!(name, level, sections, requirement, function)`: `function(fixtures, kind)` for each stream. Needs the pair, where
/// nothing else is named before the function.
macro_rules! both {
    ($name:literal, $level:expr, $sections:expr, $requirement:literal, $test:path) => {
        both!($name, $level, $sections, $requirement, PAIR, $test)
    };
    ($name:literal, $level:expr, $sections:expr, $requirement:literal, $needs:expr, $test:path) => {
        Case::both(
            [concat!("allocated-", $name), concat!("delta-", $name)],
            $level,
            $sections,
            $requirement,
            $needs,
            [|fixtures| Box::pin($test(fixtures, Allocated)), |fixtures| Box::pin($test(fixtures, Delta))],
        )
    };
}

/// `one!(name, level, section, requirement, needs, function)`: `function(fixtures)`.
macro_rules! one {
    ($name:literal, $level:expr, $section:expr, $requirement:literal, $needs:expr, $test:path) => {
        Case::one($name, $level, $section, $requirement, $needs, |fixtures| Box::pin($test(fixtures)))
    };
}

/// All cases.
pub(super) fn cases() -> Vec<Case<Fixtures>> {
    const RPCS: [&str; 2] = [ALLOCATED, DELTA];
    const FORMATS: [&str; 2] = [FORMAT; 2];
    const STREAMS: [&str; 2] = [STREAM; 2];
    const ERRORS: [&str; 2] = [ALLOCATED_ERRORS, DELTA_ERRORS];
    [
        one!(
            "service-claimed",
            Must,
            OVERVIEW,
            "a plugin that serves SnapshotMetadata lists SNAPSHOT_METADATA_SERVICE among its capabilities",
            NONE,
            errors::claimed
        ),
        both!("served", Must, RPCS, "a plugin with the service implements the RPC", errors::served),
        both!(
            "order",
            Must,
            RPCS,
            "byte_offset strictly increases, in a message and from one to the next",
            format::order
        ),
        both!(
            "overlap",
            Must,
            RPCS,
            "no tuple starts before the one before it ends, also across messages",
            format::overlap
        ),
        both!(
            "positive-size",
            Must,
            FORMATS,
            "byte_offset counts from zero and size_bytes is greater than zero",
            format::positive
        ),
        both!(
            "inside",
            Must,
            FORMATS,
            "a tuple names a range of the volume, so it ends at its capacity at the latest",
            format::inside
        ),
        both!(
            "type-known",
            Must,
            RPCS,
            "block_metadata_type is FIXED_LENGTH or VARIABLE_LENGTH",
            format::style_known
        ),
        both!(
            "type-constant",
            Must,
            RPCS,
            "block_metadata_type is the same in all messages of a stream",
            format::style_constant
        ),
        both!("fixed-size", Must, RPCS, "with FIXED_LENGTH all tuples have one size", format::fixed_size),
        both!(
            "capacity-constant",
            Must,
            RPCS,
            "volume_capacity_bytes is the same in all messages of a stream",
            format::capacity_constant
        ),
        both!(
            "capacity",
            Must,
            RPCS,
            "volume_capacity_bytes is the capacity of the volume",
            format::capacity_value
        ),
        both!(
            "max-results",
            Must,
            RPCS,
            "a message has at most max_results tuples, whatever the bound, and the answer stays the same",
            format::max_results
        ),
        both!(
            "first-tuple",
            Must,
            RPCS,
            "no tuple ends at or before starting_offset, wherever that lies",
            offsets::first_tuple
        ),
        both!(
            "offset-complete",
            Must,
            STREAMS,
            "starting_offset is part of the computation: nothing behind it is lost",
            offsets::complete
        ),
        both!(
            "resume",
            Must,
            STREAMS,
            "a stream that was cut is continued at the byte after the last tuple, whichever that was",
            offsets::resume
        ),
        one!(
            "delta-offset-partial",
            Must,
            STREAM,
            "a change of a few bytes, at the start or the end of a block, is listed from any offset before it",
            NONE,
            offsets::partial
        ),
        both!(
            "offset-at-capacity",
            Should,
            ERRORS,
            "an offset equal to the capacity does not exceed it: OK, without tuples",
            offsets::at_capacity
        ),
        both!(
            "offset-beyond",
            Must,
            ERRORS,
            "an offset that exceeds the volume is OUT_OF_RANGE",
            offsets::beyond
        ),
        both!("offset-negative", Must, ERRORS, "a negative offset is OUT_OF_RANGE", offsets::negative),
        both!("id-missing", Must, ERRORS, "a missing id is INVALID_ARGUMENT", errors::missing_id),
        both!("id-unknown", Must, ERRORS, "an id of no snapshot is NOT_FOUND", errors::unknown_id),
        both!("id-deleted", Must, ERRORS, "a deleted snapshot's id is NOT_FOUND", CALLS, errors::deleted_id),
        both!(
            "max-results-negative",
            Must,
            ERRORS,
            "a negative max_results is an invalid argument: refused, or taken for none",
            errors::negative_bound
        ),
        one!(
            "delta-reversed",
            Must,
            DELTA,
            "the target was created after the base; the other way round is an invalid argument",
            PAIR,
            errors::reversed
        ),
        one!(
            "delta-other-volume",
            Must,
            DELTA,
            "base and target are snapshots of one volume; of two, they are an invalid argument",
            PAIR,
            errors::other_volume
        ),
        one!(
            "delta-same-snapshot",
            Should,
            DELTA,
            "a snapshot as its own target is refused as invalid, or has no changes",
            PAIR,
            errors::same_snapshot
        ),
        one!(
            "allocated-complete",
            Must,
            STREAM,
            "the stream ends with OK only after all that was written is in its tuples",
            PAIR,
            complete::written
        ),
        one!(
            "allocated-full-backup",
            Must,
            ALLOCATED,
            "the tuples hold all valid data: a restored volume has none outside of them",
            RESTORED,
            complete::full_backup
        ),
        one!(
            "allocated-never-written",
            Should,
            ALLOCATED,
            "a snapshot of a volume that was never written has no allocated ranges, and a capacity",
            PAIR,
            complete::never_written
        ),
        one!(
            "delta-complete",
            Must,
            STREAM,
            "the stream ends with OK only after all that changed is in its tuples",
            PAIR,
            complete::changed
        ),
        one!(
            "delta-incremental-backup",
            Must,
            DELTA,
            "the tuples hold all changes: outside of them base and target, restored, are equal",
            RESTORED,
            complete::incremental_backup
        ),
        one!(
            "delta-discarded",
            Must,
            DELTA,
            "data that was discarded has changed",
            PAIR,
            complete::discarded
        ),
        one!(
            "delta-zeroed",
            Must,
            DELTA,
            "data that was overwritten with zeros has changed",
            PAIR,
            complete::zeroed
        ),
        one!(
            "delta-new-data",
            Must,
            DELTA,
            "a range that was written for the first time has changed",
            PAIR,
            complete::new_data
        ),
        one!(
            "delta-across",
            Must,
            DELTA,
            "base and target need not be neighbours: changes over a snapshot between them are all there",
            PAIR,
            complete::across
        ),
        one!(
            "delta-unchanged",
            Should,
            DELTA,
            "two snapshots without a write between them differ in nothing",
            CALLS,
            complete::unchanged
        ),
        one!(
            "written-on",
            Must,
            OVERVIEW,
            "the answers are about snapshots: writes to the volume after them change nothing",
            PAIR,
            life::written_on
        ),
        one!(
            "expanded-old-snapshot",
            Must,
            ALLOCATED,
            "a snapshot from before an expansion keeps its capacity and its ranges",
            EXPANDED,
            life::old_capacity
        ),
        one!(
            "expanded-capacity",
            Must,
            DELTA,
            "after an expansion the capacity is that of the target snapshot",
            EXPANDED,
            life::new_capacity
        ),
        one!(
            "expanded-delta",
            Must,
            DELTA,
            "what was written to the new part of an expanded volume has changed",
            EXPANDED,
            life::grown
        ),
        one!(
            "expanded-resume",
            Must,
            STREAM,
            "a stream over an expansion that was cut is continued at the byte after the last tuple, whichever that was",
            EXPANDED,
            offsets::resume_expanded
        ),
        one!(
            "restored-between",
            Must,
            DELTA,
            "a restore from the base, written to or not, takes no change out of the delta",
            BETWEEN,
            life::restored_between
        ),
        one!(
            "cloned-between",
            Must,
            DELTA,
            "a clone of the volume, written to, takes no change out of the delta",
            NONE,
            life::cloned_between
        ),
        one!(
            "restored-snapshot",
            Must,
            ALLOCATED,
            "what a volume was restored with is its data: its snapshots list it",
            BETWEEN,
            life::of_restored
        ),
        one!(
            "source-deleted",
            Must,
            OVERVIEW,
            "a snapshot outlives its volume: the answers stay the same",
            PAIR,
            life::source_deleted
        ),
        one!(
            "middle-deleted",
            Must,
            DELTA,
            "a snapshot that was deleted between base and target takes no change with it",
            PAIR,
            life::middle_deleted
        ),
        one!(
            "base-deleted",
            Must,
            DELTA_ERRORS,
            "a deleted base is NOT_FOUND, or still answered in full",
            PAIR,
            life::base_deleted
        ),
        one!(
            "base-deleted-again",
            Must,
            DELTA_ERRORS,
            "what a driver says of a deleted base it says again, and from an offset: NOT_FOUND, or the same answer",
            PAIR,
            life::base_deleted_again
        ),
        one!(
            "tail",
            Must,
            ALLOCATED,
            "if the size of a volume is not a multiple of usual blocks, the last bytes are listed, and no other capacity",
            NONE,
            life::tail
        ),
        one!(
            "group-members",
            Must,
            DELTA,
            "snapshots of a group are base and target as any others",
            NONE,
            life::group_members
        ),
        one!(
            "filesystem-volume",
            Should,
            OVERVIEW,
            "the service is for block volumes; a volume with a filesystem may be one below",
            NONE,
            life::filesystem
        ),
        both!(
            "deadline",
            Must,
            STREAMS,
            "a stream that its deadline cut never ends with OK",
            DENSE,
            streams::deadline
        ),
        both!(
            "cancel",
            Must,
            STREAMS,
            "a client that is gone ends its own stream and no other",
            DENSE,
            streams::cancel
        ),
        both!(
            "slow-reader",
            Must,
            STREAMS,
            "a stream whose client reads slowly, and stops for a while, is whole",
            DENSE,
            streams::slow_reader
        ),
        both!(
            "many",
            Must,
            STREAMS,
            "a million ranges are all listed, in messages that a client takes (4 MiB), whatever max_results",
            DENSE,
            streams::many
        ),
        one!(
            "modified-between",
            Must,
            DELTA,
            "a volume that is modified (VolumeAttributesClass), also while it is streamed, loses no change and no answer",
            DENSE_CALLS,
            meanwhile::modified
        ),
        both!(
            "deleted-meanwhile",
            Must,
            STREAMS,
            "a snapshot deleted while it is streamed: all of it, or an error",
            DENSE_CALLS,
            meanwhile::deleted
        ),
        one!(
            "expanded-meanwhile",
            Must,
            STREAM,
            "a volume that is expanded while its snapshots are streamed: no range is lost, and the capacity stays theirs",
            DENSE_CALLS,
            meanwhile::expanded
        ),
        one!(
            "cloned-meanwhile",
            Must,
            STREAM,
            "a volume that is cloned while its snapshots are streamed: no range is lost",
            DENSE_CALLS,
            meanwhile::cloned
        ),
        one!(
            "restored-volume-read",
            Must,
            STREAM,
            "streams are whole while a volume restored from the snapshot is read",
            RESTORED,
            streams::while_read
        ),
        both!("concurrent", Must, STREAMS, "each of many streams at once is whole", ALONE, streams::beside),
        one!(
            "alive",
            Must,
            STREAM,
            "the plugin answers after all cut, refused and parallel streams",
            LAST,
            streams::alive
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}
