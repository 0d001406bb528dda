//! What an answer must be like, over all its parts: pure, without a connection.
//!
//! An answer that was cut is asked for again from an offset on, and the answer to that is its next part. The rules of the
//! specification hold for each part, and style and capacity for all of them.

use std::fmt;

/// A range of bytes that is allocated, or that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub length: u64,
}

impl Range {
    /// The byte after the last one.
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// How the driver lists ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// In blocks of one length.
    FixedLength,
    /// In extents of any length.
    VariableLength,
}

/// How an answer breaks the contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The contract does not know the style.
    Style(i32),
    /// The capacity is negative.
    Capacity(i64),
    /// The style is not that of the messages before.
    StyleChanged(Style, Style),
    /// The capacity is not that of the messages before.
    CapacityChanged(u64, u64),
    /// A range is empty or negative, or its end is past the capacity: offset, length, capacity. Of a fixed length, which need
    /// not divide the capacity, the last one may end past it, and counts up to it.
    Range(i64, i64, u64),
    /// A range begins before the end of the one before it in the same answer: its offset, and that end.
    Order(u64, u64),
    /// The server ended the answer with OK and sent no message, so not even the capacity is known.
    NoMessage,
    /// An answer that was asked for from the beginning of a known range does not hold all of that range.
    Forgotten(Range),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::Style(style) => write!(f, "block_metadata_type is {style}, which is not known"),
            Violation::Capacity(bytes) => write!(f, "volume_capacity_bytes is {bytes}"),
            Violation::StyleChanged(was, is) => {
                write!(f, "block_metadata_type was {was:?} first and is {is:?} now")
            }
            Violation::CapacityChanged(was, is) => {
                write!(f, "volume_capacity_bytes was {was} first and is {is} now")
            }
            Violation::Range(offset, length, capacity) => write!(
                f,
                "the range of {length} bytes at {offset} is not in a volume of {capacity} bytes, or is empty"
            ),
            Violation::Order(offset, end) => {
                write!(f, "a range begins at {offset}, and the one before it ends at {end}")
            }
            Violation::NoMessage => {
                f.write_str("it ended with OK and without any message, so the capacity is not known")
            }
            Violation::Forgotten(range) => write!(
                f,
                "it was asked for again from byte {} on, and the range of {} bytes there is not in it any more",
                range.offset, range.length
            ),
        }
    }
}

/// A message, of either call and either contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub style: i32,
    pub capacity: i64,
    /// Offset and length of each tuple.
    pub tuples: Vec<(i64, i64)>,
}

/// What comes after a part that ended with OK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The answer is whole.
    Whole,
    /// The part had no message, which does not show that there is nothing more: another part is needed, which cannot be
    /// empty.
    AskAgain,
}

/// An answer so far.
#[derive(Debug)]
pub(crate) struct Answer {
    shape: Option<(Style, u64)>,
    /// Every range before this byte is known.
    end: u64,
    /// The last range as the server sent it.
    last: Option<Range>,
    part: Part,
    /// The next part begins at the last range, not after it.
    again: bool,
}

/// The part that is being received.
#[derive(Debug, Default)]
struct Part {
    has_message: bool,
    /// The end of its last tuple.
    end: u64,
    /// What is left of a known range that it has to hold.
    owed: Option<Range>,
}

impl Answer {
    /// An answer of which everything before `start` is not wanted.
    pub fn from(start: u64) -> Self {
        Answer { shape: None, end: start, last: None, part: Part::default(), again: false }
    }

    pub fn shape(&self) -> Option<(Style, u64)> {
        self.shape
    }

    /// Every range before this byte is known.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Begins the next part: the offset to ask for.
    ///
    /// That is the byte after the last range, unless a server may refuse it or take it for another: at the end of the
    /// volume, which is out of range, and inside a block of 4 KiB. Then it is the beginning of the last range, which the
    /// server has chosen itself, and which the part then has to hold.
    pub fn begin_part(&mut self) -> u64 {
        let is_plain = !self.again
            && self.end.is_multiple_of(4096)
            && self.shape.is_none_or(|(_, capacity)| self.end < capacity);
        self.again = false;
        let owed = self.last.filter(|_| !is_plain);
        self.part = Part { owed, ..Part::default() };
        owed.map_or(self.end, |range| range.offset)
    }

    /// The ranges in the part's next message that were not known yet.
    pub fn accept(&mut self, message: Message) -> Result<Vec<Range>, Violation> {
        let style = match message.style {
            1 => Style::FixedLength,
            2 => Style::VariableLength,
            other => return Err(Violation::Style(other)),
        };
        let capacity = u64::try_from(message.capacity).map_err(|_| Violation::Capacity(message.capacity))?;
        match self.shape {
            None => self.shape = Some((style, capacity)),
            Some((was, _)) if was != style => return Err(Violation::StyleChanged(was, style)),
            Some((_, was)) if was != capacity => return Err(Violation::CapacityChanged(was, capacity)),
            Some(_) => {}
        }
        self.part.has_message = true;
        let mut ranges = Vec::with_capacity(message.tuples.len());
        for (offset, length) in message.tuples {
            let wrong = || Violation::Range(offset, length, capacity);
            let mut range = Range {
                offset: u64::try_from(offset).map_err(|_| wrong())?,
                length: u64::try_from(length).map_err(|_| wrong())?,
            };
            if style == Style::FixedLength && range.offset < capacity {
                range.length = range.length.min(capacity - range.offset);
            }
            // Both are below 2^63.
            if range.length == 0 || range.end() > capacity {
                return Err(wrong());
            }
            if range.offset < self.part.end {
                return Err(Violation::Order(range.offset, self.part.end));
            }
            self.part.end = range.end();
            self.part.settle(range)?;
            // A server may begin before the offset that it was asked for: what is known already is cut off.
            let from = range.offset.max(self.end);
            if from < range.end() {
                self.end = range.end();
                self.last = Some(range);
                ranges.push(Range { offset: from, length: range.end() - from });
            }
        }
        Ok(ranges)
    }

    /// The server ended the part with OK.
    pub fn finish_part(&mut self) -> Result<Ended, Violation> {
        if let Some(range) = self.part.owed {
            return Err(Violation::Forgotten(range));
        }
        match (self.part.has_message, self.last) {
            (true, _) => Ok(Ended::Whole),
            (false, Some(_)) => {
                self.again = true;
                Ok(Ended::AskAgain)
            }
            (false, None) => Err(Violation::NoMessage),
        }
    }
}

impl Part {
    /// Takes a tuple of the part off what it owes.
    fn settle(&mut self, range: Range) -> Result<(), Violation> {
        let Some(owed) = self.owed.filter(|owed| range.end() > owed.offset) else { return Ok(()) };
        if range.offset > owed.offset {
            return Err(Violation::Forgotten(owed));
        }
        let left = owed.end().saturating_sub(range.end());
        self.owed = (left > 0).then_some(Range { offset: range.end(), length: left });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: i64 = 1 << 20;

    fn message(tuples: &[(i64, i64)]) -> Message {
        Message { style: 2, capacity: CAPACITY, tuples: tuples.to_vec() }
    }

    fn ranges(pairs: &[(u64, u64)]) -> Vec<Range> {
        pairs.iter().map(|&(offset, length)| Range { offset, length }).collect()
    }

    /// An answer whose first part was cut after these tuples.
    fn cut_after(tuples: &[(i64, i64)]) -> Answer {
        let mut answer = Answer::from(0);
        assert_eq!(answer.begin_part(), 0);
        answer.accept(message(tuples)).expect("a valid part");
        answer
    }

    #[test]
    fn the_next_part_begins_after_the_last_range_or_at_it() {
        for (what, tuples, asked) in [
            ("nothing came", vec![], 0),
            ("an aligned end", vec![(0, 4096), (8192, 8192)], 16384),
            ("an end inside a block", vec![(0, 4096), (8192, 1000)], 8192),
            ("the end of the volume", vec![(0, 4096), (CAPACITY - 8192, 8192)], CAPACITY as u64 - 8192),
            ("the whole volume", vec![(0, CAPACITY)], 0),
        ] {
            assert_eq!(cut_after(&tuples).begin_part(), asked, "{what}");
        }
        assert_eq!(Answer::from(12288).begin_part(), 12288);
    }

    #[test]
    fn what_is_known_is_cut_off_and_nothing_else() {
        for (what, tuples, new) in [
            ("after it", vec![(20480, 4096)], vec![(20480, 4096)]),
            ("at it", vec![(16384, 4096)], vec![(16384, 4096)]),
            ("all of it again", vec![(0, 4096), (8192, 8192), (32768, 1)], vec![(32768, 1)]),
            ("across it", vec![(8192, 16384), (32768, 4096)], vec![(16384, 8192), (32768, 4096)]),
            ("only what is known", vec![(8192, 8192)], vec![]),
        ] {
            let mut answer = cut_after(&[(0, 4096), (8192, 8192)]);
            assert_eq!(answer.begin_part(), 16384);
            assert_eq!(answer.accept(message(&tuples)), Ok(ranges(&new)), "{what}");
            assert_eq!(answer.finish_part(), Ok(Ended::Whole), "{what}");
        }
        // The same where the caller knows a part already.
        let mut answer = Answer::from(10000);
        assert_eq!(answer.begin_part(), 10000);
        let new = answer.accept(message(&[(0, 4096), (8192, 4096), (16384, 1)]));
        assert_eq!(new, Ok(ranges(&[(10000, 2288), (16384, 1)])));
    }

    /// 4096 bytes of a volume whose capacity they do not divide.
    #[test]
    fn the_last_range_of_a_fixed_length_counts_up_to_the_capacity() {
        let fixed = |tuples: &[(i64, i64)]| Message { style: 1, capacity: 10_000, tuples: tuples.to_vec() };
        let mut answer = Answer::from(0);
        answer.begin_part();
        let new = answer.accept(fixed(&[(4096, 4096), (8192, 4096)]));
        assert_eq!(new, Ok(ranges(&[(4096, 4096), (8192, 1808)])));
        // Cut there, it is asked for again, and known.
        assert_eq!(answer.begin_part(), 8192);
        assert_eq!(answer.accept(fixed(&[(8192, 4096)])), Ok(Vec::new()));
        assert_eq!(answer.finish_part(), Ok(Ended::Whole));
        let mut answer = Answer::from(0);
        answer.begin_part();
        let beyond = answer.accept(fixed(&[(12288, 4096)]));
        assert_eq!(beyond, Err(Violation::Range(12288, 4096, 10_000)));
    }

    #[test]
    fn a_part_that_breaks_the_contract_is_refused() {
        let tuples = |tuples: &[(i64, i64)]| message(tuples);
        for (what, message, violation) in [
            ("no style", Message { style: 0, ..message(&[]) }, Violation::Style(0)),
            ("a style of the future", Message { style: 3, ..message(&[]) }, Violation::Style(3)),
            (
                "another style",
                Message { style: 1, ..message(&[]) },
                Violation::StyleChanged(Style::VariableLength, Style::FixedLength),
            ),
            ("no capacity", Message { capacity: -1, ..message(&[]) }, Violation::Capacity(-1)),
            (
                "another capacity",
                Message { capacity: 4096, ..message(&[]) },
                Violation::CapacityChanged(1 << 20, 4096),
            ),
            ("an empty range", tuples(&[(20480, 0)]), Violation::Range(20480, 0, 1 << 20)),
            ("a negative length", tuples(&[(20480, -1)]), Violation::Range(20480, -1, 1 << 20)),
            ("a negative offset", tuples(&[(-4096, 4096)]), Violation::Range(-4096, 4096, 1 << 20)),
            ("past the end", tuples(&[(CAPACITY - 1, 2)]), Violation::Range(CAPACITY - 1, 2, 1 << 20)),
            (
                "past every number",
                tuples(&[(i64::MAX, i64::MAX)]),
                Violation::Range(i64::MAX, i64::MAX, 1 << 20),
            ),
            ("overlapping", tuples(&[(20480, 4096), (20481, 4096)]), Violation::Order(20481, 24576)),
            ("backwards", tuples(&[(20480, 4096), (0, 4096)]), Violation::Order(0, 24576)),
        ] {
            // In the part that continues the answer, and in the first one after a message.
            for begins_again in [true, false] {
                let mut answer = cut_after(&[(0, 4096)]);
                if begins_again {
                    answer.begin_part();
                }
                assert_eq!(answer.accept(message.clone()), Err(violation.clone()), "{what}");
            }
        }
    }

    #[test]
    fn an_end_without_a_message_is_not_believed() {
        let mut answer = Answer::from(0);
        answer.begin_part();
        assert_eq!(answer.finish_part(), Err(Violation::NoMessage));
        // With an empty message it is an empty answer.
        let mut answer = cut_after(&[]);
        assert_eq!(answer.finish_part(), Ok(Ended::Whole));
        // An answer that continues is asked for once more, from a range that has to be there.
        let mut answer = cut_after(&[(0, 4096), (8192, 8192)]);
        assert_eq!(answer.begin_part(), 16384);
        assert_eq!(answer.finish_part(), Ok(Ended::AskAgain));
        assert_eq!(answer.begin_part(), 8192);
        assert_eq!(answer.accept(message(&[(8192, 8192)])), Ok(vec![]));
        assert_eq!(answer.finish_part(), Ok(Ended::Whole));
    }

    #[test]
    fn a_range_that_was_listed_has_to_be_listed_again() {
        let forgotten = |offset, length| Err(Violation::Forgotten(Range { offset, length }));
        for (what, tuples, accepted, finished) in [
            ("it is", vec![(8192, 8192)], Ok(vec![]), Ok(Ended::Whole)),
            ("in two", vec![(8192, 4096), (12288, 4096)], Ok(vec![]), Ok(Ended::Whole)),
            ("in a larger one", vec![(4096, 16384)], Ok(ranges(&[(16384, 4096)])), Ok(Ended::Whole)),
            ("cut short", vec![(8192, 4096)], Ok(vec![]), forgotten(12288, 4096).map(|()| Ended::Whole)),
            (
                "its front is missing",
                vec![(12288, 4096)],
                forgotten(8192, 8192).map(|()| vec![]),
                Ok(Ended::Whole),
            ),
            (
                "a hole in it",
                vec![(8192, 100), (8392, 7992)],
                forgotten(8292, 8092).map(|()| vec![]),
                Ok(Ended::Whole),
            ),
            ("none", vec![], Ok(vec![]), forgotten(8192, 8192).map(|()| Ended::Whole)),
            ("one before it", vec![(0, 8192)], Ok(vec![]), forgotten(8192, 8192).map(|()| Ended::Whole)),
            ("one after it", vec![(32768, 4096)], forgotten(8192, 8192).map(|()| vec![]), Ok(Ended::Whole)),
        ] {
            let mut answer = cut_after(&[(0, 4096), (8192, 8192)]);
            answer.begin_part();
            assert_eq!(answer.finish_part(), Ok(Ended::AskAgain));
            assert_eq!(answer.begin_part(), 8192);
            let is_accepted = accepted.is_ok();
            assert_eq!(answer.accept(message(&tuples)), accepted, "{what}");
            if is_accepted {
                assert_eq!(answer.finish_part(), finished, "{what}");
            }
        }
    }

    /// Any stream, cut anywhere, with servers that round the offset down: the same bytes, each once, in order.
    #[test]
    fn cuts_lose_nothing_and_double_nothing() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            let (unit, capacity) = ([512, 4096, 65536][random.usize(..3)], 4_000_000 + random.i64(0..70_000));
            let mut all = Vec::new();
            let mut at = 0;
            while at < capacity && all.len() < 40 {
                let length = (unit * random.i64(1..5)).min(capacity - at);
                if random.bool() {
                    all.push((at, length));
                }
                at += length;
            }
            let mut answer = Answer::from(0);
            let mut got = Vec::new();
            'parts: loop {
                let asked = answer.begin_part() as i64;
                let from = asked / unit * unit;
                let listed = all.iter().filter_map(|&(offset, length): &(i64, i64)| {
                    let begin = offset.max(from);
                    (offset + length > from).then_some((begin, offset + length - begin))
                });
                let cut = random.usize(..12);
                let mut sent = 0;
                for tuple in listed {
                    if sent == cut {
                        continue 'parts;
                    }
                    let message = Message { style: 2, capacity, tuples: vec![tuple] };
                    got.extend(answer.accept(message).expect("it is valid"));
                    sent += 1;
                }
                // Cut at the end, before the server could say OK.
                if random.u8(..4) == 0 {
                    continue;
                }
                if sent == 0 && random.bool() {
                    answer.accept(Message { style: 2, capacity, tuples: vec![] }).expect("it is valid");
                }
                match answer.finish_part() {
                    Ok(Ended::Whole) => break,
                    Ok(Ended::AskAgain) => {}
                    Err(violation) => {
                        assert_eq!((violation, all.len()), (Violation::NoMessage, 0));
                        break;
                    }
                }
            }
            assert!(got.windows(2).all(|pair| pair[0].end() <= pair[1].offset), "{got:?}");
            let joined = |pairs: Vec<(i64, i64)>| {
                let mut joined: Vec<(i64, i64)> = Vec::new();
                for (offset, length) in pairs {
                    match joined.last_mut().filter(|last| last.0 + last.1 == offset) {
                        Some(last) => last.1 += length,
                        None => joined.push((offset, length)),
                    }
                }
                joined
            };
            let got = got.iter().map(|range| (range.offset as i64, range.length as i64)).collect();
            assert_eq!(joined(got), joined(all));
        }
    }
}
