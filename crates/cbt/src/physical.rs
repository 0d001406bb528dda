//! Which ranges of two files may differ, according to their physical extents.

use std::iter::Peekable;

use base::Address;
use base::ByteRange;
use base::Extent;
use files::Result;

/// The ranges in which `parent` and `child` may differ, ascending and disjoint, from their extents.
///
/// Ranges are only equal if they have the same address in both while both exist, or are zeros in both (a hole or
/// an unwritten extent). Everything else may differ, also what is opaque in either. Costs one pass
/// over both lists.
pub struct PhysicalDiff<P: Iterator<Item = Result<Extent>>, C: Iterator<Item = Result<Extent>>> {
    parent: Cuts<P>,
    child: Cuts<C>,
    position: u64,
    failed: bool,
}

impl<P, C> PhysicalDiff<P, C>
where
    P: Iterator<Item = Result<Extent>>,
    C: Iterator<Item = Result<Extent>>,
{
    /// Compares two extent lists, each in ascending order.
    pub fn new(parent: P, child: C) -> Self {
        PhysicalDiff { parent: Cuts::new(parent), child: Cuts::new(child), position: 0, failed: false }
    }

    fn advance(&mut self) -> Result<Option<ByteRange>> {
        loop {
            let parent = self.parent.at(self.position)?;
            let child = self.child.at(self.position)?;
            let end = match (parent.until, child.until) {
                (None, None) => return Ok(None),
                (parent, child) => parent.unwrap_or(u64::MAX).min(child.unwrap_or(u64::MAX)),
            };
            let range = ByteRange { start: self.position, end };
            self.position = end;
            if may_differ(parent.content, child.content) {
                return Ok(Some(range));
            }
        }
    }
}

impl<P, C> Iterator for PhysicalDiff<P, C>
where
    P: Iterator<Item = Result<Extent>>,
    C: Iterator<Item = Result<Extent>>,
{
    type Item = Result<ByteRange>;

    fn next(&mut self) -> Option<Result<ByteRange>> {
        if self.failed {
            return None;
        }
        let item = self.advance().transpose();
        self.failed = matches!(item, Some(Err(_)));
        item
    }
}

/// What a file reads as from a position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zeros,
    At(u64),
    Opaque,
}

fn may_differ(parent: Content, child: Content) -> bool {
    match (parent, child) {
        (Content::Zeros, Content::Zeros) => false,
        (Content::At(parent), Content::At(child)) => parent != child,
        _ => true,
    }
}

struct Stretch {
    content: Content,
    /// Where the content changes next; `None` when it never does.
    until: Option<u64>,
}

/// An extent list with a cursor: positions ascend.
struct Cuts<I: Iterator<Item = Result<Extent>>> {
    extents: Peekable<I>,
}

impl<I: Iterator<Item = Result<Extent>>> Cuts<I> {
    fn new(extents: I) -> Self {
        Cuts { extents: extents.peekable() }
    }

    fn at(&mut self, position: u64) -> Result<Stretch> {
        while let Some(Ok(extent)) = self.extents.peek()
            && extent.range.end <= position
        {
            self.extents.next();
        }
        let extent = match self.extents.peek() {
            None => return Ok(Stretch { content: Content::Zeros, until: None }),
            Some(Ok(extent)) => *extent,
            Some(Err(_)) => {
                // Peeked as an error, so it is one; taking it out makes it ours to return.
                let Some(Err(error)) = self.extents.next() else { return self.at(position) };
                return Err(error);
            }
        };
        if position < extent.range.start {
            return Ok(Stretch { content: Content::Zeros, until: Some(extent.range.start) });
        }
        let content = match extent.address {
            Address::At(address) => Content::At(address + (position - extent.range.start)),
            Address::Unwritten => Content::Zeros,
            Address::Opaque => Content::Opaque,
        };
        Ok(Stretch { content, until: Some(extent.range.end) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: u64, end: u64, address: u64) -> Extent {
        Extent { range: ByteRange { start, end }, address: Address::At(address) }
    }

    fn unwritten(start: u64, end: u64) -> Extent {
        Extent { range: ByteRange { start, end }, address: Address::Unwritten }
    }

    fn opaque(start: u64, end: u64) -> Extent {
        Extent { range: ByteRange { start, end }, address: Address::Opaque }
    }

    fn diff(parent: &[Extent], child: &[Extent]) -> Vec<(u64, u64)> {
        let list = |extents: &[Extent]| extents.iter().copied().map(Ok).collect::<Vec<_>>().into_iter();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for range in PhysicalDiff::new(list(parent), list(child)) {
            let range = range.expect("no I/O here");
            match joined.last_mut() {
                Some(last) if last.1 == range.start => last.1 = range.end,
                _ => joined.push((range.start, range.end)),
            }
        }
        joined
    }

    type Case<'c> = (&'c str, &'c [Extent], &'c [Extent], &'c [(u64, u64)]);

    #[test]
    fn what_may_differ() {
        let cases: &[Case<'_>] = &[
            ("nothing in either", &[], &[], &[]),
            ("all shared", &[at(0, 8, 100)], &[at(0, 8, 100)], &[]),
            ("shared, cut differently", &[at(0, 8, 100)], &[at(0, 3, 100), at(3, 8, 103)], &[]),
            (
                "rewritten in the middle",
                &[at(0, 8, 100)],
                &[at(0, 3, 100), at(3, 5, 900), at(5, 8, 105)],
                &[(3, 5)],
            ),
            ("punched", &[at(0, 8, 100)], &[at(0, 2, 100), at(4, 8, 104)], &[(2, 4)]),
            ("written into a hole", &[], &[at(4, 8, 100)], &[(4, 8)]),
            ("unwritten is zeros", &[], &[unwritten(0, 8)], &[]),
            ("unwritten over data is a change", &[at(0, 8, 100)], &[unwritten(0, 8)], &[(0, 8)]),
            ("preallocated, then written", &[unwritten(0, 8)], &[at(0, 8, 100)], &[(0, 8)]),
            ("opaque is never equal", &[opaque(0, 8)], &[opaque(0, 8)], &[(0, 8)]),
            ("opaque against a hole", &[opaque(0, 4)], &[], &[(0, 4)]),
            (
                "the same blocks swapped",
                &[at(0, 4, 100), at(4, 8, 104)],
                &[at(0, 4, 104), at(4, 8, 100)],
                &[(0, 8)],
            ),
            ("same address, shifted in the file", &[at(0, 4, 100)], &[at(2, 6, 100)], &[(0, 6)]),
            ("the child grew", &[at(0, 4, 100)], &[at(0, 4, 100), at(8, 12, 50)], &[(8, 12)]),
            ("the child is shorter", &[at(0, 8, 100)], &[at(0, 4, 100)], &[(4, 8)]),
            ("overlapping cuts", &[at(0, 5, 100), at(5, 9, 200)], &[at(1, 7, 101)], &[(0, 1), (5, 9)]),
        ];
        for (name, parent, child, expected) in cases {
            assert_eq!(diff(parent, child), *expected, "{name}");
        }
    }

    #[test]
    fn an_error_in_either_list_ends_the_walk_with_it() {
        let broken = || {
            let source = std::io::Error::from_raw_os_error(5);
            Err(files::Error { operation: "list", path: "x".into(), at: None, source })
        };
        let items: Vec<_> =
            PhysicalDiff::new([broken()].into_iter(), [Ok(at(0, 4, 1))].into_iter()).collect();
        assert!(matches!(items.as_slice(), [Err(_)]));
        let items: Vec<_> =
            PhysicalDiff::new([Ok(at(0, 4, 1))].into_iter(), [Ok(at(0, 4, 1)), broken()].into_iter())
                .collect();
        assert!(matches!(items.last(), Some(Err(_))));
    }
}
