//! Memory for direct I/O. Opening, reading and writing files is not here.

use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut};

/// What direct reads and writes must be aligned to, in memory and on the device. One that wants more answers `EINVAL`.
pub const ALIGN: usize = 4096;
/// A huge page. A disk reads into one in fewer parts than into small pages that lie anywhere: a backup of noise on a virtual disk
/// takes 3.4 s with them and 5.2 s without.
const HUGE: usize = 2 << 20;
/// From this length on the kernel is asked for huge pages, and a shorter buffer than one takes a whole one.
const LONG: usize = HUGE / 2;

/// Memory that begins on a page and holds zeros at first. The kernel gets it back on drop.
///
/// It never maps a file: where the disk fails, a read answers an error, but access to a map ends the process with SIGBUS.
#[derive(Debug, Default)]
pub struct AlignedBuffer {
    memory: Option<MmapMut>,
    /// Bytes of it that are asked for.
    length: usize,
}

impl AlignedBuffer {
    /// `length` is in bytes.
    ///
    /// # Panics
    ///
    /// Where the kernel has no such memory left.
    pub fn new(length: usize) -> Self {
        // Linux puts a map on the border of huge pages where it is a multiple of them.
        let mapped = if length < LONG { length } else { length.next_multiple_of(HUGE) };
        let memory = MmapMut::map_anon(mapped).expect("memory for direct I/O");
        if length >= LONG {
            // Not every kernel has them, and small ones do as well.
            let _ = memory.advise(Advice::HugePage);
        }
        AlignedBuffer { memory: Some(memory), length }
    }

    /// The first bytes of it. Where it is too short it becomes longer, and holds zeros.
    pub fn part(&mut self, length: usize) -> &mut [u8] {
        if self.len() < length {
            *self = Self::new(length);
        }
        &mut self[..length]
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_deref().map_or(&[], |memory| &memory[..self.length])
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_deref_mut().map_or(&mut [], |memory| &mut memory[..self.length])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel says of the mapping that holds an address: `VmFlags` in `smaps`.
    fn flags(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        let holds = |line: &str| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            Some((number(start)?..number(end)?).contains(&address))
        };
        let mapping = maps.lines().skip_while(|line| holds(line) != Some(true));
        let flags = mapping.skip(1).find_map(|line| line.strip_prefix("VmFlags:"));
        flags.expect("a mapping").to_owned()
    }

    #[test]
    fn memory_is_aligned_and_zeros_and_in_huge_pages_where_it_is_long() {
        let has_huge = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        for length in [0, 1, ALIGN, ALIGN + 1, LONG - 1, LONG, HUGE - 1, HUGE, HUGE + 1] {
            let mut buffer = AlignedBuffer::new(length);
            assert_eq!(buffer.as_ptr().addr() % ALIGN, 0, "{length}");
            assert!(buffer.len() == length && buffer.iter().all(|byte| *byte == 0), "{length}");
            buffer.fill(7);
            let is_huge = flags(buffer.as_ptr().addr()).split(' ').any(|flag| flag == "hg");
            assert_eq!(is_huge, has_huge && length >= LONG, "{length}");
        }
    }

    #[test]
    fn a_part_is_the_beginning_or_new_memory() {
        // How long it is, how long the part, and what it begins with.
        let table =
            [(0, 0, None), (0, 5, Some(0)), (9, 5, Some(7)), (9, 9, Some(7)), (9, ALIGN * 3, Some(0))];
        for (length, part, first) in table {
            let mut buffer = if length == 0 { AlignedBuffer::default() } else { AlignedBuffer::new(length) };
            buffer.fill(7);
            let bytes = buffer.part(part);
            assert_eq!((bytes.len(), bytes.first().copied()), (part, first), "{part} of {length}");
            assert_eq!(buffer.len(), part.max(length), "{part} of {length}");
        }
    }
}
