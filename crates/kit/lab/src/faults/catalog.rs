//! The faults there are: the name of each, what it does, what it takes, and which calls it is meant for.

use serde::Serialize;

/// The two streams of SnapshotMetadata.
pub(super) const STREAMS: &[&str] = &["GetMetadataAllocated", "GetMetadataDelta"];
const DELTA: &[&str] = &["GetMetadataDelta"];
const SNAPSHOT: &[&str] = &["CreateSnapshot"];
const PLUGIN: &[&str] = &["GetPluginCapabilities"];
const ALL: &[&str] = &["*"];
/// No call: the connection itself.
pub(super) const CONNECTION: &[&str] = &["connection"];

/// A fault, and what `--list` says of it.
#[derive(Debug, Serialize)]
pub(super) struct Entry {
    pub name: &'static str,
    #[serde(skip)]
    pub kind: Kind,
    pub group: &'static str,
    /// Calls that it is for, where nothing else is said; `*` is all.
    pub calls: &'static [&'static str],
    /// Values that it takes, each with its default.
    pub takes: &'static [(&'static str, &'static str)],
    pub does: &'static str,
}

/// What the values of faults mean.
pub(super) const VALUES: &[(&str, &str)] = &[
    ("after", "messages, or tuples, that pass before"),
    ("bytes", "bytes of the stream, or of each piece of it; 0: not by bytes"),
    ("code", "the gRPC code, as in NOT_FOUND; of `cut` and `error-becomes` OK too"),
    ("from", "the gRPC code that is replaced"),
    ("ms", "milliseconds"),
    ("of", "calls in each round"),
    ("percent", "how many of a hundred; which ones, the seed says"),
    ("size", "bytes, as in 4Ki"),
    ("times", "calls"),
    ("value", "a secret's value"),
];

/// What a fault can be limited to, whichever it is.
pub(super) const LIMITS: &[(&str, &str)] = &[
    ("call", "calls of this name of CSI, as in GetMetadataDelta; `*` is all, `+` joins several"),
    ("snapshot", "calls about this snapshot: its id, or its name at a gateway"),
    (
        "when",
        "streams that are whole (starting_offset 0), resumed, unaligned (to 4096) or negative (max_results)",
    ),
    ("account", "calls with a token of this ServiceAccount, at a gateway: its name"),
    ("nth", "the n-th of these calls alone"),
    ("first", "the first n of them"),
    ("every", "each n-th of them"),
    ("share", "this share of them, as in 0.1; which ones, the seed says"),
];

macro_rules! catalog {
    ($($group:literal: { $($kind:ident $name:literal $calls:ident [$($value:ident $default:literal),*] $does:literal;)* })*) => {
        /// A fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Kind { $($($kind,)*)* }

        /// All faults.
        pub(super) const CATALOG: &[Entry] = &[$($(Entry {
            name: $name,
            kind: Kind::$kind,
            group: $group,
            calls: $calls,
            takes: &[$((stringify!($value), $default)),*],
            does: $does,
        },)*)*];
    };
}

catalog! {
    "The stream and its connection": {
        Cut "cut" STREAMS [after "1", bytes "0", code "UNAVAILABLE"]
            "ends the stream after `after` messages, or after `bytes` bytes in the middle of one, with `code`; with OK the client believes that it has all";
        Stall "stall" STREAMS [after "0"] "sends nothing more after `after` messages and does not end; unary calls are never answered";
        Delay "delay" ALL [ms "1000"] "waits `ms` before the call is passed on";
        LateFirst "late-first-message" STREAMS [ms "1000"] "waits `ms` between the head of the answer and its first message";
        Drip "drip" STREAMS [ms "100", bytes "0"] "waits `ms` before each message, or before each piece of `bytes` bytes";
        Reset "reset" ALL [after "0"] "closes the connection, with all calls on it; in a stream after `after` messages";
        NoFirst "no-first-message" STREAMS [] "leaves the first message out, with its tuples";
        Repeat "repeat-message" STREAMS [after "0"] "sends a message twice, the one after `after` others";
        ReadAhead "read-ahead" STREAMS [size "64Ki"] "hands over up to `size` bytes that the client has not asked for yet, as a driver with a buffer does";
        Huge "huge-messages" STREAMS [size "5Mi"] "fills each message up to `size` with an unknown field: over 4Mi most clients refuse it";
        TlsExpired "tls-expired" CONNECTION [] "shows an expired certificate to new connections (`--listen https://`)";
        TlsOtherHost "tls-other-host" CONNECTION [] "shows a certificate for another host";
        TlsOtherAuthority "tls-other-authority" CONNECTION [] "shows a certificate of another authority";
        TlsOldVersions "tls-old-versions" CONNECTION [] "takes clients that offer nothing later than TLS 1.1, as far as their first message";
        Plaintext "plaintext" CONNECTION [] "serves HTTP/2 without TLS too";
    }
    "Tuples": {
        SwapTuples "swap-tuples" STREAMS [] "swaps the first two tuples of each message";
        SwapMessages "swap-messages" STREAMS [] "swaps the second and the third message";
        Overlap "overlap" STREAMS [] "sends one tuple a message, each reaching into the next one";
        DuplicateTuple "duplicate-tuple" STREAMS [] "sends the first tuple of each message twice";
        EmptyTuple "empty-tuple" STREAMS [] "gives the first tuple of each message size 0";
        NegativeOffset "negative-offset" STREAMS [] "gives the first tuple of each message the offset -4096";
        NegativeSize "negative-size" STREAMS [] "makes the size of the first tuple of each message negative";
        PastCapacity "past-capacity" STREAMS [] "lets the last tuple of VARIABLE_LENGTH end 512 bytes past the capacity";
        LastFixedPasses "last-fixed-past-capacity" STREAMS [] "the same of FIXED_LENGTH, which the spec allows";
        TypeUnknown "type-unknown" STREAMS [] "says UNKNOWN instead of a type";
        TypeChanges "type-changes" STREAMS [after "1"] "tells the other type after `after` messages";
        FixedUneven "fixed-uneven" STREAMS [] "calls tuples of any size FIXED_LENGTH";
        CapacityChanges "capacity-changes" STREAMS [after "1"] "tells 4096 bytes more after `after` messages";
        CapacityWrong "capacity-wrong" STREAMS [] "tells half of the capacity";
        EmptyWithoutMessage "empty-without-message" STREAMS [] "ends an answer without tuples with OK and no message";
        EmptyIsError "empty-is-error" STREAMS [code "INTERNAL"] "refuses what has no tuples with `code`";
        EndRepeatsLast "end-repeats-last" STREAMS [] "answers an offset at the capacity with the last 4096 bytes";
        EndIsError "end-is-error" STREAMS [code "OUT_OF_RANGE"] "refuses an offset at the capacity with `code`";
    }
    "Changes that are lost, or too many": {
        LoseTuple "lose-tuple" STREAMS [after "0"] "leaves one tuple out, the one after `after` others";
        LoseLast "lose-last" STREAMS [] "leaves the last tuple out";
        LoseShare "lose-share" STREAMS [percent "50"] "leaves `percent` of a hundred tuples out";
        LoseSmall "lose-small" STREAMS [size "4Ki"] "leaves out the tuples of `size` bytes or less";
        LoseLater "lose-later" STREAMS [after "10000"] "ends with OK after `after` tuples, as a driver with a limit of its own";
        LoseDiscarded "lose-discarded" DELTA [] "leaves out what the target holds no more";
        LoseAgain "lose-when-asked-again" STREAMS [] "leaves the first tuple out where the same was asked before";
        LoseAfterCancel "lose-after-cancel" STREAMS [] "leaves the last tuple out once a client has left a stream";
        LoseBeside "lose-beside" STREAMS [] "leaves the last tuple out of a stream that is opened while another is open";
        LoseSlow "lose-slow" STREAMS [ms "200"] "ends with OK a stream whose reader takes nothing for `ms`";
        TooMuch "too-much" STREAMS [] "lists the whole volume as one tuple";
    }
    "How the request is read": {
        IgnoreBound "ignore-max-results" STREAMS [] "takes max_results for 0";
        NegativeBoundIsNone "negative-bound-is-none" STREAMS [] "takes a negative max_results for 0, which is allowed";
        NegativeBoundCuts "negative-bound-cuts" STREAMS [] "the same, and leaves the last tuple out";
        IgnoreOffset "ignore-offset" STREAMS [] "takes starting_offset for 0";
        RoundOffsetUp "round-offset-up" STREAMS [] "rounds starting_offset up to 4096";
        ShiftedWindow "shifted-window" STREAMS [size "4Ki"]
            "if `starting_offset` is not a multiple of `size`, lists the block before each changed one";
    }
    "What is refused": {
        Refuse "refuse" ALL [code "UNAVAILABLE"] "refuses the call with `code`";
        Burst "burst" ALL [times "3", of "10", code "UNAVAILABLE"] "of each `of` calls refuses the first `times` with `code`";
        PutOff "put-off" ALL [code "ABORTED"] "refuses each call that changes something once with `code`, by its name";
        ErrorBecomes "error-becomes" STREAMS [from "NOT_FOUND", code "INTERNAL"]
            "what is refused with `from` is refused with `code`; with OK it is an answer without tuples";
        SameIsRefused "same-is-refused" DELTA [code "INVALID_ARGUMENT"] "refuses a snapshot as its own target with `code`";
        WantsSecrets "wants-secrets" ALL [value "sesame"] "refuses calls that may have secrets and have none with this value with UNAUTHENTICATED";
        NoService "no-service" ALL [] "neither claims nor serves SnapshotMetadata";
        NotClaimed "service-not-claimed" PLUGIN [] "serves SnapshotMetadata without SNAPSHOT_METADATA_SERVICE";
        ExpansionNotClaimed "expansion-not-claimed" ALL [] "does not claim EXPAND_VOLUME";
        GroupsNotClaimed "groups-not-claimed" ALL [] "does not claim GROUP_CONTROLLER_SERVICE";
        NodeElsewhere "node-elsewhere" ALL [] "answers calls of the node plugin with UNIMPLEMENTED";
    }
    "Who asks a gateway": {
        TokenNotNeeded "token-not-needed" STREAMS [] "answers calls without a token as an earlier call that was let in";
        AudienceNotChecked "audience-not-checked" STREAMS [] "answers tokens for another audience as an earlier call that was let in";
        ExpiryNotChecked "expiry-not-checked" STREAMS [] "answers tokens that have expired as an earlier call that was let in";
        SignatureNotChecked "signature-not-checked" STREAMS []
            "accepts tokens with an invalid signature, and texts that are not tokens: answers as an earlier call that was let in";
        RightsNotChecked "rights-not-checked" STREAMS [] "answers calls that were PERMISSION_DENIED as an earlier call that was let in";
        NamespaceNotChecked "namespace-not-checked" STREAMS []
            "answers a snapshot that is NOT_FOUND from the namespace of an earlier call that was let in";
    }
    "What happened before": {
        BaseGone "base-gone" DELTA [after "1", code "NOT_FOUND"]
            "ends the delta with `code` after `after` messages, and from then on every delta with this base at once";
        BaseGoneIsEmpty "base-gone-is-empty" DELTA [] "answers a delta from a deleted base with OK and no tuples";
        BaseGoneIsError "base-gone-is-error" DELTA [code "NOT_FOUND"] "refuses a delta from a deleted base with `code`";
        BaseGoneLosesLater "base-gone-loses-later" DELTA [] "answers a delta from a deleted base once, and without tuples from then on";
        SourceGone "source-gone" STREAMS [code "NOT_FOUND"] "refuses snapshots whose volume was deleted with `code`";
        LoseAfterDelete "lose-after-delete" STREAMS [] "leaves the first tuple out once a snapshot was deleted";
        DeleteEndsStreams "delete-ends-streams" STREAMS [] "ends open streams with OK when a snapshot is deleted";
        LoseAfterRestore "lose-after-restore" DELTA [] "leaves the first tuple out once a snapshot was restored";
        LoseRestored "lose-restored" STREAMS [] "leaves half of the tuples out of snapshots of restored volumes";
        LoseAfterClone "lose-after-clone" DELTA [] "leaves the first tuple out once a volume was cloned";
        LoseAfterModify "lose-after-modify" DELTA [] "leaves the first tuple out once a volume was modified";
        ModifyEndsStreams "modify-ends-streams" STREAMS [] "ends open streams with OK when a volume is modified";
        ExpandEndsStreams "expand-ends-streams" STREAMS [] "ends open streams with OK when a volume is expanded";
        CloneEndsStreams "clone-ends-streams" STREAMS [] "ends open streams with OK when a volume is cloned";
        LoseAfterExpand "lose-after-expand" STREAMS [] "leaves the last tuple out once a volume was expanded";
        RestoredInUse "restored-in-use" STREAMS [code "ABORTED"] "refuses streams with `code` while a restored volume is published";
        OldSnapshotsGrow "old-snapshots-grow" STREAMS [] "tells the new capacity of snapshots from before an expansion";
        GrownStaysSmall "grown-stays-small" STREAMS [] "tells the old capacity after an expansion";
        LoseGrown "lose-grown" STREAMS [] "leaves out what lies behind the old capacity after an expansion";
        ResumeGrownFails "resume-grown-fails" DELTA [code "OUT_OF_RANGE"]
            "refuses an offset past the capacity of the base with `code`, though the target has it";
        LoseMembers "lose-group-members" DELTA [] "leaves the first tuple out of snapshots of a group";
        FilesystemIsError "filesystem-is-error" STREAMS [code "INTERNAL"] "refuses snapshots of Filesystem volumes with `code`";
        FilesystemIsEmpty "filesystem-is-empty" STREAMS [] "lists no tuples of Filesystem volumes";
        DeadlineIsOk "deadline-is-ok" STREAMS [] "ends with OK a stream that its deadline meets";
    }
    "Snapshots": {
        NotReady "snapshot-not-ready" SNAPSHOT [times "1"] "says of a snapshot that it is not ready, for `times` answers";
        FailsAfterSuccess "fails-after-success" SNAPSHOT [times "1", code "INTERNAL"]
            "has the call carried out and answers `code` the first `times` times that it is made";
    }
}

/// The fault of that name.
pub(super) fn find(name: &str) -> Option<&'static Entry> {
    CATALOG.iter().find(|entry| entry.name == name)
}

/// What `--list --output json` and the HTTP API tell.
#[derive(Serialize)]
pub(super) struct List {
    faults: &'static [Entry],
    values: &'static [(&'static str, &'static str)],
    limits: &'static [(&'static str, &'static str)],
}

pub(super) fn all() -> List {
    List { faults: CATALOG, values: VALUES, limits: LIMITS }
}

/// The same for people.
pub(super) fn text() -> String {
    let (mut text, mut group) = (String::new(), "");
    for entry in CATALOG {
        if entry.group != group {
            group = entry.group;
            text += &format!("\n{group}\n");
        }
        let takes: Vec<String> =
            entry.takes.iter().map(|(name, default)| format!("{name}={default}")).collect();
        let takes = if takes.is_empty() { String::new() } else { format!(":{}", takes.join(",")) };
        text += &format!("  {}{takes}\n      {} ({})\n", entry.name, entry.does, entry.calls.join(", "));
    }
    for (heading, rows) in [("Values", VALUES), ("Any fault can be limited to", LIMITS)] {
        text += &format!("\n{heading}\n");
        text.extend(rows.iter().map(|(name, does)| format!("  {name:<9} {does}\n")));
    }
    text
}
