//! Fuzz target: whatever a client sends, it gets the bytes that it may read, and the server takes no more memory than for one
//! read.

use std::io::{Read, Result, Write};

use super::{Disk, LONGEST, Status, talk};
use crate::error;

const SIZE: u64 = 1 << 20;

/// Zeros, of which every second sector is a hole.
struct Zeros;

impl Disk for Zeros {
    fn name(&self) -> &str {
        "20260102T030405.678Z-abcdef"
    }

    fn size(&self) -> u64 {
        SIZE
    }

    fn sector(&self) -> u32 {
        512
    }

    fn read(&self, offset: u64, length: u32) -> error::Result<Vec<u8>> {
        self.check(offset, length);
        Ok(vec![0; length as usize])
    }

    fn status(&self, offset: u64, length: u32, most: usize) -> error::Result<Vec<Status>> {
        self.check(offset, length);
        let sectors = offset / 512..(offset + u64::from(length)) / 512;
        Ok(sectors.map(|sector| (512, sector.is_multiple_of(2))).take(most).collect())
    }
}

impl Zeros {
    fn check(&self, offset: u64, length: u32) {
        assert!(length <= LONGEST && offset.checked_add(length.into()).is_some_and(|end| end <= SIZE));
        assert!(offset.is_multiple_of(512) && length.is_multiple_of(512));
    }
}

/// A client that sends these bytes, and takes every answer.
struct Client<'c> {
    bytes: &'c [u8],
    taken: u64,
}

impl Read for Client<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.bytes.read(buffer)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, buffer: &[u8]) -> Result<usize> {
        self.taken += buffer.len() as u64;
        Ok(buffer.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// What a client sends from the first byte on.
pub fn nbd(bytes: &[u8]) {
    let mut client = Client { bytes, taken: 0 };
    let _ = talk(&Zeros, &mut client);
    // The greeting, and for each request of 28 bytes, or option of 16, at most the whole disk.
    assert!(client.taken <= 1024 + (bytes.len() as u64).div_ceil(16) * (SIZE + 1024), "{}", client.taken);
}

#[cfg(test)]
pub mod seeds {
    /// Clients that name the export, that ask for structured replies and the allocation, and that write.
    pub fn nbd() -> [Vec<u8>; 3] {
        let hello = 3u32.to_be_bytes().to_vec();
        let option = |number: u32, content: &[u8]| {
            [&b"IHAVEOPT"[..], &number.to_be_bytes(), &(content.len() as u32).to_be_bytes(), content].concat()
        };
        let request = |flags: u16, command: u16, offset: u64, length: u32| {
            [
                &super::super::REQUEST.to_be_bytes()[..],
                &flags.to_be_bytes(),
                &command.to_be_bytes(),
                b"a cookie",
                &offset.to_be_bytes(),
                &length.to_be_bytes(),
            ]
            .concat()
        };
        let context = [&[0; 4][..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
        let go = option(7, &[0; 6]);
        [
            [hello.clone(), option(1, b""), request(0, 0, 4096, 512), request(0, 2, 0, 0)].concat(),
            [
                hello.clone(),
                option(8, b""),
                option(9, &[0; 8]),
                option(10, &context),
                go.clone(),
                request(0, 7, 0, 1 << 20),
                request(1 << 3, 7, 512, 4096),
                request(0, 0, 0, 1 << 20),
                // Past the end, and further than numbers go.
                request(0, 0, 1 << 20, 512),
                request(0, 7, u64::MAX - 511, 1024),
            ]
            .concat(),
            [
                hello,
                option(3, b""),
                option(99, b"x"),
                go,
                request(0, 1, 0, 4),
                b"data".to_vec(),
                request(0, 0, 1, 1),
            ]
            .concat(),
        ]
    }
}
