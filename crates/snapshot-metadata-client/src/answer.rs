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
    /// The style is none that the contract knows.
    Style(i32),
    /// The capacity is negative.
    Capacity(i64),
    /// The style is not that of the messages before.
    StyleChanged(Style, Style),
    /// The capacity is not that of the messages before.
    CapacityChanged(u64, u64),
    /// A range is empty or negative, or its end is past the capacity: offset, length, capacity.
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
    /// The last range as the server told it.
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
            let range = Range {
                offset: u64::try_from(offset).map_err(|_| wrong())?,
                length: u64::try_from(length).map_err(|_| wrong())?,
            };
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
