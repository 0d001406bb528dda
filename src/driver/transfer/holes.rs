//! What blocks hold no data in: found at the source, cut out of what is sent, and put back as zeros to check hashes.

use std::borrow::Cow;
use std::iter::Peekable;

use base::ByteRange;

use crate::driver::transfer::write::ALIGN;

/// What holds no data in `bytes`, which begin on a block. `parts` is what holds data there and behind, and is consumed up to
/// the end of `bytes`. Parts are widened to what direct writes must be aligned to.
pub(super) fn holes_in<E>(
    parts: &mut Peekable<impl Iterator<Item = Result<ByteRange, E>>>,
    bytes: ByteRange,
) -> Result<Vec<ByteRange>, E> {
    let (mut holes, mut at) = (Vec::new(), bytes.start);
    while let Some(part) = parts.next_if(|part| part.as_ref().map_or(true, |part| part.end < bytes.end)) {
        let part = part?;
        take_out(&mut holes, &mut at, part);
    }
    if let Some(Ok(part)) = parts.peek()
        && part.start < bytes.end
    {
        take_out(&mut holes, &mut at, *part);
    }
    if at < bytes.end {
        holes.push(ByteRange { start: at, end: bytes.end });
    }
    Ok(holes)
}

/// Adds the hole between `at` and a part, if there is one, and moves `at` to the end of the part.
fn take_out(holes: &mut Vec<ByteRange>, at: &mut u64, part: ByteRange) {
    let start = part.start - part.start % ALIGN as u64;
    if start > *at {
        holes.push(ByteRange { start: *at, end: start });
    }
    *at = part.end.next_multiple_of(ALIGN as u64).max(*at);
}

/// Removes the holes from bytes that stand in `data` from `before` on.
pub(super) fn cut_out(data: &mut Vec<u8>, before: usize, holes: &[ByteRange]) {
    let Some(first) = holes.first() else { return };
    let whole = data.len();
    let mut to = before + first.start as usize;
    for (number, hole) in holes.iter().enumerate() {
        let from = before + hole.end as usize;
        let end = holes.get(number + 1).map_or(whole, |next| before + next.start as usize);
        data.copy_within(from..end, to);
        to += end - from;
    }
    data.truncate(to);
}

/// Each part of `length` bytes, ascending, and whether it is a hole. `None` if the holes do not lie one behind the other
/// within the length.
pub(super) fn parts(length: u64, holes: &[ByteRange]) -> Option<Vec<(ByteRange, bool)>> {
    let (mut parts, mut at) = (Vec::with_capacity(holes.len() * 2 + 1), 0);
    for hole in holes {
        if hole.start < at || hole.is_empty() || hole.end > length {
            return None;
        }
        if hole.start > at {
            parts.push((ByteRange { start: at, end: hole.start }, false));
        }
        parts.push((*hole, true));
        at = hole.end;
    }
    if at < length {
        parts.push((ByteRange { start: at, end: length }, false));
    }
    Some(parts)
}

/// The bytes with zeros for the holes. `None` if it is not as many bytes as the parts hold.
pub(super) fn fill<'d>(data: &'d [u8], parts: &[(ByteRange, bool)]) -> Option<Cow<'d, [u8]>> {
    let held: u64 = parts.iter().filter(|(_, is_hole)| !is_hole).map(|(part, _)| part.len()).sum();
    if held != data.len() as u64 {
        return None;
    }
    if parts.iter().all(|(_, is_hole)| !is_hole) {
        return Some(Cow::Borrowed(data));
    }
    let mut rest = data;
    let mut whole = Vec::with_capacity(parts.last().map_or(0, |(part, _)| part.end as usize));
    for (part, is_hole) in parts {
        match is_hole {
            true => whole.resize(part.end as usize, 0),
            false => {
                let (bytes, behind) = rest.split_at(part.len() as usize);
                whole.extend_from_slice(bytes);
                rest = behind;
            }
        }
    }
    Some(Cow::Owned(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    fn ranges(kib: &[(u64, u64)]) -> Vec<ByteRange> {
        kib.iter().map(|(start, end)| ByteRange { start: start * KIB, end: end * KIB }).collect()
    }

    #[test]
    fn what_is_cut_out_is_put_back() {
        let length = 64 * KIB;
        for (data, expected) in [
            (&[][..], &[&[(0, 64)][..], &[(0, 64)]][..]),
            (&[(0, 128)], &[&[], &[]]),
            (&[(4, 8), (60, 68)], &[&[(0, 4), (8, 60)], &[(4, 64)]]),
            // Both in one aligned part, and one across the border.
            (&[(9, 10), (11, 12), (62, 65)], &[&[(0, 8), (12, 60)], &[(4, 64)]]),
            (&[(0, 4), (120, 128)], &[&[(4, 64)], &[(0, 56)]]),
        ] {
            let found = ranges(data);
            let mut found = found.into_iter().map(Ok::<_, ()>).peekable();
            for (run, expected) in (0..).zip(expected) {
                let bytes = ByteRange { start: run * length, end: (run + 1) * length };
                let holes = holes_in(&mut found, bytes).expect("no error");
                let relative: Vec<ByteRange> = holes
                    .iter()
                    .map(|hole| ByteRange { start: hole.start - bytes.start, end: hole.end - bytes.start })
                    .collect();
                assert_eq!(relative, ranges(expected), "{data:?}, {run}");
                let parts = parts(length, &relative).expect("in order");
                let mut whole = vec![7; length as usize];
                parts.iter().filter(|(_, is_hole)| *is_hole).for_each(|(part, _)| {
                    whole[part.start as usize..part.end as usize].fill(0);
                });
                let mut sent = [&[9; 3][..], &whole].concat();
                cut_out(&mut sent, 3, &relative);
                assert_eq!(fill(&sent[3..], &parts).expect("as many"), whole, "{data:?}, {run}");
                assert!(fill(&sent[2..], &parts).is_none());
            }
        }
        for wrong in [&[(4, 8), (6, 9)][..], &[(8, 9), (4, 5)], &[(60, 65)], &[(4, 4)]] {
            assert_eq!(parts(length, &ranges(wrong)), None, "{wrong:?}");
        }
    }

    #[test]
    fn an_error_is_handed_on() {
        let mut found = [Err("a bad sector")].into_iter().peekable();
        assert_eq!(holes_in(&mut found, ByteRange { start: 0, end: 4096 }), Err("a bad sector"));
    }
}
