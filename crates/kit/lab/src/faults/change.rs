//! What faults do to the messages of a stream. A [`Changer`] takes them one after another, so the length of a stream costs
//! no memory; those that must know what comes next hold one message back.

use std::sync::Arc;

use proto::{BlockMetadata, BlockMetadataType, GetMetadataDeltaResponse};

use super::catalog::Kind;
use super::spec::Spec;
use crate::random;

/// A message of either stream, at the driver's socket or a gateway's address: they are the same on the wire.
pub(super) type Message = GetMetadataDeltaResponse;

/// What a fault knows of the call.
#[derive(Clone, Debug, Default)]
pub(super) struct About {
    pub offset: i64,
    pub seed: u64,
    /// The capacity that is sent instead.
    pub capacity: Option<i64>,
    /// Where the volume ended before it was expanded.
    pub old_end: Option<i64>,
    /// What the target holds, ascending; for [`Kind::LoseDiscarded`].
    pub held: Vec<(i64, i64)>,
    /// Whether what the fault is about has happened.
    pub applies: bool,
}

/// A fault at work on one stream.
#[derive(Debug)]
pub(super) struct Changer {
    pub spec: Arc<Spec>,
    about: About,
    /// Messages and tuples seen.
    messages: u64,
    tuples: u64,
    held: Vec<Message>,
    is_over: bool,
}

impl Changer {
    pub fn new(spec: Arc<Spec>, about: About) -> Self {
        Changer { spec, about, messages: 0, tuples: 0, held: Vec::new(), is_over: false }
    }

    /// What becomes of a message: none, one or several.
    pub fn message(&mut self, mut message: Message) -> Vec<Message> {
        let number = self.messages;
        self.messages += 1;
        let values = &self.spec.values;
        match self.spec.entry.kind {
            Kind::NoFirst if number == 0 => return Vec::new(),
            Kind::Repeat if number == values.after => return vec![message.clone(), message],
            Kind::SwapTuples if message.block_metadata.len() > 1 => message.block_metadata.swap(0, 1),
            Kind::SwapMessages if number == 1 => {
                self.held.push(message);
                return Vec::new();
            }
            Kind::SwapMessages if number == 2 => {
                return [message].into_iter().chain(self.held.pop()).collect();
            }
            Kind::Overlap => return self.overlap(&message),
            Kind::DuplicateTuple => {
                if let Some(first) = message.block_metadata.first().copied() {
                    message.block_metadata.insert(0, first);
                }
            }
            Kind::EmptyTuple => first(&mut message).into_iter().for_each(|tuple| tuple.size_bytes = 0),
            Kind::NegativeOffset => {
                first(&mut message).into_iter().for_each(|tuple| tuple.byte_offset = -4096)
            }
            Kind::NegativeSize => {
                first(&mut message).into_iter().for_each(|tuple| tuple.size_bytes = -tuple.size_bytes)
            }
            Kind::PastCapacity | Kind::LastFixedPasses => {
                let fixed = self.spec.entry.kind == Kind::LastFixedPasses;
                let style =
                    if fixed { BlockMetadataType::FixedLength } else { BlockMetadataType::VariableLength };
                message.block_metadata_type = style.into();
                return self.hold(message);
            }
            Kind::TypeUnknown => message.block_metadata_type = BlockMetadataType::Unknown.into(),
            Kind::TypeChanges if number >= values.after => {
                message.block_metadata_type = 3 - message.block_metadata_type;
            }
            Kind::FixedUneven => message.block_metadata_type = BlockMetadataType::FixedLength.into(),
            Kind::CapacityChanges if number >= values.after => message.volume_capacity_bytes += 4096,
            Kind::CapacityWrong => message.volume_capacity_bytes /= 2,
            Kind::OldSnapshotsGrow | Kind::GrownStaysSmall => {
                message.volume_capacity_bytes = self.about.capacity.unwrap_or(message.volume_capacity_bytes);
            }
            Kind::LoseTuple => {
                let at = values.after.checked_sub(self.tuples);
                self.tuples += message.block_metadata.len() as u64;
                if let Some(at) = at.filter(|at| *at < message.block_metadata.len() as u64) {
                    message.block_metadata.remove(at as usize);
                }
            }
            Kind::LoseAgain
            | Kind::LoseAfterDelete
            | Kind::LoseAfterRestore
            | Kind::LoseAfterClone
            | Kind::LoseAfterModify
            | Kind::LoseMembers
                if self.about.applies && self.tuples == 0 && !message.block_metadata.is_empty() =>
            {
                self.tuples += 1;
                message.block_metadata.remove(0);
            }
            Kind::LoseLast => return self.hold(message),
            Kind::LoseAfterCancel | Kind::LoseBeside | Kind::LoseAfterExpand | Kind::NegativeBoundCuts
                if self.about.applies =>
            {
                return self.hold(message);
            }
            Kind::LoseShare => self.lose_share(&mut message, values.percent),
            Kind::LoseRestored if self.about.applies => self.lose_share(&mut message, 50),
            Kind::LoseSmall => {
                let size = values.size;
                message.block_metadata.retain(|tuple| tuple.size_bytes.unsigned_abs() > size);
            }
            Kind::LoseLater => {
                if self.is_over {
                    return Vec::new();
                }
                let left = values.after.saturating_sub(self.tuples);
                self.tuples += message.block_metadata.len() as u64;
                self.is_over = message.block_metadata.len() as u64 > left;
                message.block_metadata.truncate(left as usize);
            }
            Kind::LoseDiscarded => {
                let held = &self.about.held;
                message.block_metadata.retain(|tuple| {
                    let end = tuple.byte_offset.saturating_add(tuple.size_bytes);
                    let next = held
                        .partition_point(|(start, size)| start.saturating_add(*size) <= tuple.byte_offset);
                    held.get(next).is_some_and(|(start, _)| *start < end)
                });
            }
            Kind::LoseGrown => {
                let end = self.about.old_end.unwrap_or(i64::MAX);
                message.block_metadata.retain(|tuple| tuple.byte_offset < end);
            }
            Kind::BaseGoneLosesLater | Kind::FilesystemIsEmpty if self.about.applies => {
                message.block_metadata.clear()
            }
            Kind::TooMuch => {
                if number > 0 {
                    return Vec::new();
                }
                let size_bytes = message.volume_capacity_bytes;
                let is_at_end = self.about.offset >= size_bytes;
                message.block_metadata =
                    if is_at_end { Vec::new() } else { vec![BlockMetadata { byte_offset: 0, size_bytes }] };
            }
            Kind::ShiftedWindow => {
                let size = values.size as i64;
                if self.about.offset % size != 0 {
                    for tuple in message.block_metadata.iter_mut().filter(|tuple| tuple.size_bytes == size) {
                        tuple.byte_offset = (tuple.byte_offset - size).max(0);
                    }
                }
            }
            Kind::EndRepeatsLast
                if message.block_metadata.is_empty()
                    && self.about.offset == message.volume_capacity_bytes =>
            {
                let byte_offset = message.volume_capacity_bytes - 4096;
                message.block_metadata.push(BlockMetadata { byte_offset, size_bytes: 4096 });
            }
            _ => {}
        }
        vec![message]
    }

    /// What is held back, at the end of the stream.
    pub fn end(&mut self) -> Vec<Message> {
        let mut held = std::mem::take(&mut self.held);
        let last = held.iter_mut().rev().find(|message| !message.block_metadata.is_empty());
        match self.spec.entry.kind {
            Kind::PastCapacity | Kind::LastFixedPasses => {
                if let Some(message) = last
                    && let Some(tuple) = message.block_metadata.last_mut()
                {
                    tuple.size_bytes = message.volume_capacity_bytes - tuple.byte_offset + 512;
                }
            }
            Kind::LoseLast
            | Kind::NegativeBoundCuts
            | Kind::LoseAfterCancel
            | Kind::LoseBeside
            | Kind::LoseAfterExpand => {
                if let Some(message) = last {
                    message.block_metadata.pop();
                }
            }
            _ => {}
        }
        held
    }

    /// Holds a message back until one with tuples follows.
    fn hold(&mut self, message: Message) -> Vec<Message> {
        let pass =
            if message.block_metadata.is_empty() { Vec::new() } else { std::mem::take(&mut self.held) };
        self.held.push(message);
        pass
    }

    /// The same tuples in messages of one each, reaching into each other.
    fn overlap(&mut self, message: &Message) -> Vec<Message> {
        if message.block_metadata.is_empty() {
            return vec![message.clone()];
        }
        let mut pass = Vec::new();
        for tuple in &message.block_metadata {
            if let Some(mut held) = self.held.pop() {
                for before in &mut held.block_metadata {
                    before.size_bytes = tuple.byte_offset - before.byte_offset + 512;
                }
                pass.push(held);
            }
            self.held.push(Message { block_metadata: vec![*tuple], ..message.clone() });
        }
        pass
    }

    /// By its place, so that the same tuple is lost whenever it is asked.
    fn lose_share(&mut self, message: &mut Message, percent: u64) {
        let seed = self.about.seed;
        message.block_metadata.retain(|tuple| random::at(seed, tuple.byte_offset as u64) % 100 >= percent);
    }
}

fn first(message: &mut Message) -> Option<&mut BlockMetadata> {
    message.block_metadata.first_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: i64 = 1 << 20;

    fn message(tuples: &[(i64, i64)]) -> Message {
        let tuple = |(byte_offset, size_bytes): &(i64, i64)| BlockMetadata {
            byte_offset: *byte_offset,
            size_bytes: *size_bytes,
        };
        Message {
            block_metadata_type: BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes: CAPACITY,
            block_metadata: tuples.iter().map(tuple).collect(),
        }
    }

    /// The tuples of three messages of two each, changed.
    fn tuples(fault: &str, about: About) -> Vec<Vec<(i64, i64)>> {
        let mut changer = Changer::new(Arc::new(fault.parse().expect(fault)), about);
        let whole = [[(0, 10), (20, 10)], [(40, 10), (60, 10)], [(80, 10), (100, 10)]];
        let mut out: Vec<Message> =
            whole.iter().flat_map(|tuples| changer.message(message(tuples))).collect();
        out.extend(changer.end());
        let of = |message: &Message| {
            let tuples = message.block_metadata.iter();
            tuples.map(|tuple| (tuple.byte_offset, tuple.size_bytes)).collect()
        };
        out.iter().map(of).collect()
    }

    /// What faults do to a stream, a client sees in tests/suite/faults.rs. Here are those that find nothing to do.
    #[test]
    fn a_fault_that_does_not_apply_changes_nothing() {
        let whole = tuples("delay", About::default());
        assert_eq!(whole.concat().len(), 6);
        for fault in [
            "lose-tuple:after=6",
            "lose-share:percent=0",
            "lose-small:size=9",
            "lose-later:after=6",
            "shifted-window:size=10",
        ] {
            assert_eq!(tuples(fault, About::default()), whole, "{fault}");
        }
        assert_eq!(tuples("lose-small:size=10", About::default()), [const { Vec::new() }; 3]);
    }

    #[test]
    fn what_depends_on_the_past_does_nothing_without_it() {
        for (fault, lost) in [
            ("lose-when-asked-again", 1),
            ("lose-after-delete", 1),
            ("lose-after-restore", 1),
            ("lose-after-clone", 1),
            ("lose-after-modify", 1),
            ("lose-group-members", 1),
            ("lose-after-cancel", 1),
            ("lose-after-expand", 1),
            ("lose-beside", 1),
            ("negative-bound-cuts", 1),
            ("base-gone-loses-later", 6),
            ("filesystem-is-empty", 6),
        ] {
            let count = |applies| {
                tuples(fault, About { applies, ..About::default() }).iter().map(Vec::len).sum::<usize>()
            };
            assert_eq!((count(false), count(true)), (6, 6 - lost), "{fault}");
        }
        let held = About { held: vec![(25, 3), (60, 1)], ..About::default() };
        assert_eq!(tuples("lose-discarded", held), [vec![(20, 10)], vec![(60, 10)], vec![]]);
        let old = About { old_end: Some(50), ..About::default() };
        assert_eq!(tuples("lose-grown", old), [vec![(0, 10), (20, 10)], vec![(40, 10)], vec![]]);
        let shifted = About { offset: 7, ..About::default() };
        assert_eq!(tuples("shifted-window:size=10", shifted)[0], [(0, 10), (10, 10)]);
    }
}
