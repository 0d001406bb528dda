//! The faults of a broken driver, each of a kind that drivers have. A fault looks at calls before they are
//! handed on and at answers after, keeps what it needs to know in [`State`], and changes answers of streams.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use csi_client::{Client, Message, Options, Question};
use proto::{plugin_capability, volume_capability};
use tonic::{Code, Status};

use super::read;
use super::state::{Opened, State};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Refuses calls that come without the right secrets.
    WantsSecrets,
    /// Does not claim to expand volumes.
    ExpandsNothing,
    /// Neither claims nor serves SnapshotMetadata.
    NoService,
    /// A controller plugin: the node's is another process.
    NodeElsewhere,
    /// Never answers CreateSnapshot.
    SnapshotHangs,
    /// Puts every call that changes something off once, and says of snapshots that they are not ready yet.
    TakesItsTime,

    // Wrong, each in one way.
    ServiceNotClaimed,
    Unimplemented,
    StreamsHang,
    ProbeFails,
    SwapsTuples,
    SwapsMessages,
    Overlaps,
    EmptyTuple,
    NegativeTuple,
    PassesCapacity,
    TypeUnknown,
    TypeChanges,
    FixedIsUneven,
    CapacityChanges,
    CapacityIsWrong,
    IgnoresMaxResults,
    HugeMessages,
    IgnoresOffset,
    RoundsOffsetUp,
    LosesFirstWhenResumed,
    EndRepeatsLast,
    OutOfRangeIsOk,
    OutOfRangeIsInvalid,
    InvalidIsInternal,
    InvalidIsOk,
    NotFoundIsInternal,
    NotFoundIsOk,
    NegativeBoundSpins,
    NegativeBoundCuts,
    EmptyIsAnError,
    LosesLast,
    LosesHalf,
    LosesDiscarded,
    LosesWhenAskedAgain,
    OldSnapshotsGrow,
    GrownStaysSmall,
    LosesGrown,
    LosesAfterRestore,
    LosesRestored,
    SourceGoneIsNotFound,
    LosesAfterDelete,
    BaseGoneIsEmpty,
    FilesystemIsInternal,
    FilesystemIsEmpty,
    DeadlineIsOk,
    CancelBreaksLater,
    DeleteEndsStreams,
    TwoAtOnceLose,
    RestoredInUse,

    // Allowed, but worth knowing.
    ReportsMore,
    EmptyWithoutMessage,
    CapacityIsOutOfRange,
    NegativeBoundIsNone,
    InvalidIsPrecondition,
    NotFoundIsInvalid,
    SameIsRefused,
    FilesystemIsRefused,
    LastFixedPasses,
}

fn target(question: &Question) -> &str {
    match question {
        Question::Allocated { snapshot } => snapshot,
        Question::Delta { target, .. } => target,
    }
}

fn is_delta(question: &Question) -> bool {
    matches!(question, Question::Delta { .. })
}

fn is_same(question: &Question) -> bool {
    matches!(question, Question::Delta { base, target } if base == target && !base.is_empty())
}

fn tuples(messages: &[Message]) -> usize {
    messages.iter().map(|message| message.tuples.len()).sum()
}

fn lose_first(messages: &mut [Message]) {
    if let Some(message) = messages.iter_mut().find(|message| !message.tuples.is_empty()) {
        message.tuples.remove(0);
    }
}

fn lose_last(messages: &mut [Message]) {
    if let Some(message) = messages.iter_mut().rfind(|message| !message.tuples.is_empty()) {
        message.tuples.pop();
    }
}

fn lose_half(messages: &mut [Message]) {
    let mut number = 0;
    for message in messages {
        message.tuples.retain(|_| {
            number += 1;
            number % 2 == 0
        });
    }
}

/// The same tuples in messages of one each, so that there is something to change midway.
fn in_ones(messages: &mut Vec<Message>) {
    let ones = messages.iter().flat_map(|message| {
        message.tuples.iter().map(|tuple| Message { tuples: vec![*tuple], ..message.clone() })
    });
    let ones: Vec<Message> = ones.collect();
    if !ones.is_empty() {
        *messages = ones;
    }
}

/// An answer without tuples.
fn nothing() -> Vec<Message> {
    vec![Message { style: 2, capacity: 64 << 20, tuples: Vec::new() }]
}

fn is_secret(secrets: &HashMap<String, String>) -> bool {
    secrets.get("key").is_some_and(|value| value == "sesame")
}

impl Fault {
    /// Looks at a call before it is handed on.
    pub async fn before(
        self,
        state: &State,
        call: &str,
        request: &(dyn Any + Send + Sync),
    ) -> Result<(), Status> {
        if request.is::<proto::ProbeRequest>() && self == Fault::ProbeFails {
            return Err(Status::failed_precondition("not feeling well"));
        }
        let of_node = request.is::<proto::NodeGetCapabilitiesRequest>()
            || request.is::<proto::NodeStageVolumeRequest>()
            || request.is::<proto::NodePublishVolumeRequest>();
        if of_node && self == Fault::NodeElsewhere {
            return Err(Status::unimplemented("a controller plugin"));
        }
        if request.is::<proto::CreateSnapshotRequest>() && self == Fault::SnapshotHangs {
            std::future::pending::<()>().await;
        }
        let reads = ["get_", "list_", "probe", "stream", "controller_get", "node_get", "validate"];
        if self == Fault::TakesItsTime && !reads.iter().any(|read| call.starts_with(read)) {
            let mut asked = state.asked.lock().expect("lock");
            let times = asked.entry(call.to_owned()).or_default();
            *times += 1;
            if *times == 1 {
                return Err(Status::aborted("later"));
            }
        }
        if self == Fault::WantsSecrets {
            let secrets = [
                request.downcast_ref::<proto::CreateVolumeRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::DeleteVolumeRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::CreateSnapshotRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::DeleteSnapshotRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::ControllerExpandVolumeRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::NodeStageVolumeRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::NodePublishVolumeRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::GetMetadataAllocatedRequest>().map(|r| &r.secrets),
                request.downcast_ref::<proto::GetMetadataDeltaRequest>().map(|r| &r.secrets),
            ];
            if secrets.into_iter().flatten().any(|secrets| !is_secret(secrets)) {
                return Err(Status::unauthenticated("no secret"));
            }
        }
        if let Some(request) = request.downcast_ref::<proto::NodePublishVolumeRequest>()
            && state.restored.lock().expect("lock").contains(&request.volume_id)
        {
            state.in_use.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(request) = request.downcast_ref::<proto::DeleteVolumeRequest>() {
            state.deleted.lock().expect("lock").insert(request.volume_id.clone());
        }
        Ok(())
    }

    /// Looks at the answer of a call, and changes it.
    pub fn after(self, state: &State, request: &(dyn Any + Send + Sync), answer: &mut (dyn Any + Send)) {
        if let (Some(request), Some(answer)) = (
            request.downcast_ref::<proto::CreateVolumeRequest>(),
            answer.downcast_ref::<proto::CreateVolumeResponse>(),
        ) {
            let id = answer.volume.as_ref().expect("a volume").volume_id.clone();
            if request.volume_content_source.is_some() {
                state.restored.lock().expect("lock").insert(id.clone());
            }
            let access = request.volume_capabilities[0].access_type.as_ref();
            if matches!(access, Some(volume_capability::AccessType::Mount(_))) {
                state.mounted.lock().expect("lock").insert(id);
            }
        }
        if let Some(answer) = answer.downcast_mut::<proto::CreateSnapshotResponse>()
            && self == Fault::TakesItsTime
        {
            let snapshot = answer.snapshot.as_mut().expect("a snapshot");
            let mut asked = state.asked.lock().expect("lock");
            let times = asked.entry(snapshot.snapshot_id.clone()).or_default();
            *times += 1;
            snapshot.ready_to_use = *times > 1;
        }
        if let Some(answer) = answer.downcast_ref::<proto::CreateSnapshotResponse>() {
            let snapshot = answer.snapshot.as_ref().expect("a snapshot");
            let (id, volume) = (snapshot.snapshot_id.clone(), snapshot.source_volume_id.clone());
            state.snapshots.lock().expect("lock").insert(id, volume);
        }
        if request.is::<proto::DeleteSnapshotRequest>() {
            state.deletions.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(request) = request.downcast_ref::<proto::DeleteSnapshotRequest>() {
            state.deleted.lock().expect("lock").insert(request.snapshot_id.clone());
        }
        if let Some(answer) = answer.downcast_ref::<proto::ControllerExpandVolumeResponse>() {
            *state.grown.lock().expect("lock") = Some(answer.capacity_bytes);
        }
        if let Some(answer) = answer.downcast_mut::<proto::GetPluginCapabilitiesResponse>()
            && matches!(self, Fault::ServiceNotClaimed | Fault::NoService)
        {
            use plugin_capability::{Type, service};
            answer.capabilities.retain(|capability| {
                !matches!(&capability.r#type,
                    Some(Type::Service(s)) if s.r#type() == service::Type::SnapshotMetadataService)
            });
        }
        if let Some(answer) = answer.downcast_mut::<proto::ControllerGetCapabilitiesResponse>()
            && self == Fault::ExpandsNothing
        {
            use proto::controller_service_capability::{Type, rpc};
            answer.capabilities.retain(|capability| {
                !matches!(&capability.r#type, Some(Type::Rpc(r)) if r.r#type() == rpc::Type::ExpandVolume)
            });
        }
    }

    /// The answer to a question: the real driver's, with the fault.
    pub async fn answer(
        self,
        state: &State,
        real: &mut Client,
        question: &Question,
        mut options: Options,
    ) -> Result<Vec<Message>, Status> {
        let (offset, bound) = (options.offset, options.max_results);
        self.refuse(state, question, &options).await?;
        match self {
            Fault::IgnoresOffset if offset > 0 => options.offset = 0,
            Fault::RoundsOffsetUp if offset > 0 && offset < 1 << 40 => {
                options.offset = (offset + 4095) & !4095;
            }
            Fault::IgnoresMaxResults if bound > 0 => options.max_results = 0,
            Fault::NegativeBoundCuts if bound < 0 => options.max_results = 0,
            Fault::NegativeBoundIsNone if bound < 0 => options.max_results = 0,
            _ => {}
        }
        if let Question::Delta { base, .. } = question
            && self == Fault::BaseGoneIsEmpty
            && state.deleted.lock().expect("lock").contains(base)
        {
            return Ok(nothing());
        }
        let mut messages = match read(real, question, &options).await {
            Ok(messages) => messages,
            Err(status) => return self.refused_otherwise(status),
        };
        let capacity = messages.first().map_or(0, |message| message.capacity);
        if tuples(&messages) == 0 {
            match self {
                Fault::EmptyIsAnError if offset == 0 => return Err(Status::internal("nothing there")),
                Fault::EmptyWithoutMessage => messages.clear(),
                Fault::CapacityIsOutOfRange if offset == capacity => {
                    return Err(Status::out_of_range("at the end"));
                }
                Fault::EndRepeatsLast if offset == capacity => {
                    messages = read(real, question, &Options::default()).await?;
                    let last = messages.pop().expect("a message");
                    let tuples = last.tuples.last().into_iter().copied().collect();
                    messages = vec![Message { tuples, ..last }];
                }
                _ => {}
            }
        }
        if self == Fault::LosesDiscarded && is_delta(question) {
            let allocated = Question::Allocated { snapshot: target(question).to_owned() };
            let held: Vec<(i64, i64)> = read(real, &allocated, &Options::default())
                .await?
                .into_iter()
                .flat_map(|message| message.tuples)
                .collect();
            for message in &mut messages {
                message.tuples.retain(|(offset, size)| {
                    held.iter().any(|(start, length)| offset + size > *start && *offset < start + length)
                });
            }
        }
        self.change(state, question, offset, bound, &mut messages);
        Ok(messages)
    }

    /// Questions that a fault does not answer.
    async fn refuse(self, state: &State, question: &Question, options: &Options) -> Result<(), Status> {
        let volume = state.volume_of(target(question));
        let mounted = state.mounted.lock().expect("lock").contains(&volume);
        let deleted = state.deleted.lock().expect("lock").contains(&volume);
        match self {
            Fault::Unimplemented | Fault::NoService => Err(Status::unimplemented("no such service")),
            Fault::StreamsHang => std::future::pending().await,
            Fault::NegativeBoundSpins if options.max_results < 0 => std::future::pending().await,
            Fault::SameIsRefused if is_same(question) => Err(Status::invalid_argument("the same")),
            Fault::FilesystemIsInternal if mounted => Err(Status::internal("what is this")),
            Fault::FilesystemIsRefused if mounted => Err(Status::failed_precondition("Block volumes alone")),
            Fault::SourceGoneIsNotFound if deleted => Err(Status::not_found("its volume is gone")),
            Fault::RestoredInUse if state.in_use.load(Ordering::SeqCst) > 0 => {
                Err(Status::aborted("a volume restored from it is in use"))
            }
            _ => Ok(()),
        }
    }

    /// What a refusal of the real driver becomes.
    fn refused_otherwise(self, status: Status) -> Result<Vec<Message>, Status> {
        let empty = || Ok(nothing());
        match (self, status.code()) {
            (Fault::OutOfRangeIsOk, Code::OutOfRange) => empty(),
            (Fault::OutOfRangeIsInvalid, Code::OutOfRange) => Err(Status::invalid_argument("an offset")),
            (Fault::InvalidIsInternal, Code::InvalidArgument) => Err(Status::internal("invalid")),
            (Fault::InvalidIsOk, Code::InvalidArgument) => empty(),
            (Fault::NotFoundIsInternal, Code::NotFound) => Err(Status::internal("not found")),
            (Fault::NotFoundIsOk, Code::NotFound) => empty(),
            (Fault::InvalidIsPrecondition, Code::InvalidArgument) => {
                Err(Status::failed_precondition("not these two"))
            }
            (Fault::NotFoundIsInvalid, Code::NotFound) => Err(Status::invalid_argument("no such id")),
            _ => Err(status),
        }
    }

    /// Changes an answer.
    fn change(
        self,
        state: &State,
        question: &Question,
        offset: i64,
        bound: i32,
        messages: &mut Vec<Message>,
    ) {
        let whole = offset == 0;
        let grown = *state.grown.lock().expect("lock");
        match self {
            Fault::SwapsTuples => {
                for message in messages.iter_mut().filter(|message| message.tuples.len() > 1) {
                    message.tuples.swap(0, 1);
                }
            }
            Fault::SwapsMessages if messages.len() > 2 => messages.swap(1, 2),
            Fault::Overlaps => {
                in_ones(messages);
                for at in 1..messages.len() {
                    let next = messages[at].tuples[0].0;
                    let (start, size) = &mut messages[at - 1].tuples[0];
                    *size = next - *start + 512;
                }
            }
            Fault::EmptyTuple => messages.iter_mut().flat_map(|m| m.tuples.first_mut()).for_each(|t| t.1 = 0),
            Fault::NegativeTuple => {
                messages.iter_mut().flat_map(|m| m.tuples.first_mut()).for_each(|t| t.0 = -4096);
            }
            Fault::PassesCapacity | Fault::LastFixedPasses => {
                let fixed = self == Fault::LastFixedPasses;
                for message in messages.iter_mut() {
                    message.style = if fixed { 1 } else { 2 };
                    for (start, size) in &mut message.tuples {
                        if *start + *size == message.capacity {
                            *size += 512;
                        }
                    }
                }
            }
            Fault::TypeUnknown => messages.iter_mut().for_each(|message| message.style = 0),
            Fault::FixedIsUneven => messages.iter_mut().for_each(|message| message.style = 1),
            Fault::TypeChanges => {
                messages.iter_mut().skip(1).for_each(|message| message.style = 3 - message.style);
            }
            Fault::CapacityChanges => {
                messages.iter_mut().skip(1).for_each(|message| message.capacity += 4096)
            }
            Fault::CapacityIsWrong => messages.iter_mut().for_each(|message| message.capacity /= 2),
            Fault::HugeMessages if bound > 100_000 => lose_last(messages),
            Fault::NegativeBoundCuts if bound < 0 => lose_last(messages),
            Fault::LosesFirstWhenResumed if !whole => lose_first(messages),
            Fault::LosesLast if whole => lose_last(messages),
            Fault::LosesHalf => lose_half(messages),
            Fault::LosesWhenAskedAgain if whole => {
                let mut asked = state.asked.lock().expect("lock");
                let times = asked.entry(format!("{question:?}")).or_default();
                *times += 1;
                if *times > 1 {
                    lose_first(messages);
                }
            }
            Fault::OldSnapshotsGrow => {
                let capacity = |message: &mut Message| message.capacity = grown.unwrap_or(message.capacity);
                messages.iter_mut().for_each(capacity);
            }
            Fault::GrownStaysSmall if grown.is_some() => {
                messages.iter_mut().for_each(|message| message.capacity /= 2);
            }
            Fault::LosesGrown if grown.is_some() => {
                for message in messages.iter_mut() {
                    let half = message.capacity / 2;
                    message.tuples.retain(|(start, _)| *start < half);
                }
            }
            Fault::LosesAfterRestore
                if is_delta(question) && !state.restored.lock().expect("lock").is_empty() =>
            {
                lose_first(messages);
            }
            Fault::LosesRestored => {
                let volume = state.volume_of(target(question));
                if state.restored.lock().expect("lock").contains(&volume) {
                    lose_half(messages);
                }
            }
            Fault::LosesAfterDelete if state.deletions.load(Ordering::SeqCst) > 0 => lose_first(messages),
            Fault::FilesystemIsEmpty => {
                let volume = state.volume_of(target(question));
                if state.mounted.lock().expect("lock").contains(&volume) {
                    messages.iter_mut().for_each(|message| message.tuples.clear());
                }
            }
            Fault::CancelBreaksLater if state.cancelled.load(Ordering::SeqCst) => lose_last(messages),
            Fault::TwoAtOnceLose if state.open.load(Ordering::SeqCst) > 0 => lose_last(messages),
            Fault::ReportsMore => {
                for message in messages.iter_mut() {
                    let end = message.capacity;
                    message.tuples = vec![(0, end)];
                }
                messages.truncate(1);
            }
            _ => {}
        }
    }

    /// Whether a stream that is open ends here, and with `OK`.
    pub fn ends_early(self, state: &State, opened: &Opened, deadline: Option<Instant>) -> bool {
        match self {
            Fault::DeadlineIsOk => deadline.is_some_and(|deadline| Instant::now() >= deadline),
            Fault::DeleteEndsStreams => state.deletions.load(Ordering::SeqCst) > opened.deletions,
            _ => false,
        }
    }
}
