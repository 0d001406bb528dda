//! Sets of bytes, as sorted ranges that neither touch nor overlap.

use std::ops::Range;

/// A set of bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// The union of ranges in any order; empty ones count for nothing.
    pub fn of(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut ranges: Vec<Range<u64>> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Ranges(merged)
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// Bytes in all of them.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Where the first one starts.
    pub fn first(&self) -> Option<u64> {
        self.0.first().map(|range| range.start)
    }

    /// What lies in `from..to`.
    pub fn within(&self, from: u64, to: u64) -> Self {
        Self::of(self.iter().map(|range| range.start.max(from)..range.end.min(to)))
    }

    /// What is in `self` and not in `other`.
    pub fn minus(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        let mut others = other.0.iter().peekable();
        for range in &self.0 {
            let mut at = range.start;
            while let Some(cut) = others.peek().filter(|cut| cut.start < range.end) {
                left.push(at..cut.start.max(at));
                at = at.max(cut.end);
                if cut.end > range.end {
                    break;
                }
                others.next();
            }
            left.push(at.min(range.end)..range.end);
        }
        Self::of(left)
    }

    /// Every range widened to whole units of `unit` bytes.
    pub fn rounded(&self, unit: u64) -> Self {
        Self::of(self.iter().map(|range| range.start / unit * unit..range.end.div_ceil(unit) * unit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(ranges: &Ranges) -> u64 {
        ranges.iter().flatten().fold(0, |bits, byte| bits | 1 << byte)
    }

    /// All pairs of a few hundred small sets, against the same in the bits of a word.
    #[test]
    fn sets_are_as_sets_of_bits() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut set = || {
            let ranges = (0..4).map(|_| {
                let start = random.u64(..30);
                start..start + random.u64(..9)
            });
            Ranges::of(ranges.collect::<Vec<_>>())
        };
        let sets: Vec<Ranges> = (0..40).map(|_| set()).collect();
        for a in &sets {
            assert!(a.0.windows(2).all(|pair| pair[0].end < pair[1].start), "{a:?}");
            assert_eq!(a.bytes(), u64::from(bits(a).count_ones()));
            assert_eq!(bits(&a.within(5, 20)), bits(a) & ((1 << 20) - (1 << 5)));
            assert_eq!(a.rounded(1), *a);
            for b in &sets {
                assert_eq!(bits(&a.minus(b)), bits(a) & !bits(b), "{a:?} minus {b:?}");
            }
        }
        assert_eq!(Ranges::of([5..6, 9..12]).rounded(4).0, [4..12, 0..0][..1]);
    }
}
