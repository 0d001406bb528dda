//! Lets clients in whose `:authority` is the socket's path.
//!
//! A UNIX socket has no host name. Clients made with gRPC core (Python, C++, Ruby) send the path, percent-encoded
//! (`run%2Fcsi.sock`), and grpc-java sends it as it is; the HTTP/2 library under our server resets a stream whose
//! authority is not a host. So what a client sends passes through here first: the frames are walked, and in the value of
//! `:authority` in a HEADERS frame every byte that no host name has becomes a `-`. Our services do not read that value,
//! and its length stays, so neither framing nor the state of header compression (RFC 7541) changes. A Huffman-coded value
//! stays as it is: neither library codes it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// The client's connection preface (RFC 9113, section 3.4).
const PREFACE: usize = 24;
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// The largest frame that a server accepts unless it says otherwise, as ours does not.
const MAX_FRAME: usize = 16384;

/// A connection whose incoming `:authority` values are made acceptable.
#[derive(Debug)]
pub struct Tolerant {
    inner: UnixStream,
    /// Bytes that pass through untouched before the next frame begins.
    pass: usize,
    /// A frame's header, or a whole HEADERS frame, that is being gathered.
    gathered: Vec<u8>,
    /// What is gathered and may be handed out: `ready..` of `gathered`.
    handing_out: Option<usize>,
}

impl Tolerant {
    /// Before its first byte.
    pub fn new(inner: UnixStream) -> Self {
        Tolerant { inner, pass: PREFACE, gathered: Vec::new(), handing_out: None }
    }

    /// How long what is being gathered has to become: a frame's header, and for HEADERS all of it.
    fn wanted(&self) -> usize {
        match frame(&self.gathered) {
            Some((length, HEADERS)) if length <= MAX_FRAME => FRAME_HEADER + length,
            _ => FRAME_HEADER,
        }
    }
}

/// The length and type of a frame, once its header is there.
fn frame(bytes: &[u8]) -> Option<(usize, u8)> {
    match bytes {
        [a, b, c, kind, _, _, _, _, _, ..] => Some((u32::from_be_bytes([0, *a, *b, *c]) as usize, *kind)),
        _ => None,
    }
}

impl AsyncRead for Tolerant {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if out.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            if let Some(from) = this.handing_out {
                let count = out.remaining().min(this.gathered.len() - from);
                out.put_slice(&this.gathered[from..from + count]);
                this.handing_out = Some(from + count).filter(|next| *next < this.gathered.len());
                if this.handing_out.is_none() {
                    this.gathered.clear();
                }
                return Poll::Ready(Ok(()));
            }
            if this.pass > 0 {
                let most = out.remaining().min(this.pass);
                let mut part = ReadBuf::new(out.initialize_unfilled_to(most));
                ready!(Pin::new(&mut this.inner).poll_read(cx, &mut part))?;
                let count = part.filled().len();
                out.advance(count);
                this.pass -= count;
                return Poll::Ready(Ok(()));
            }
            let (had, wanted) = (this.gathered.len(), this.wanted());
            this.gathered.resize(wanted, 0);
            let mut part = ReadBuf::new(&mut this.gathered[had..]);
            let polled = Pin::new(&mut this.inner).poll_read(cx, &mut part);
            let count = part.filled().len();
            this.gathered.truncate(had + count);
            ready!(polled)?;
            if count == 0 {
                // The end: an unfinished frame is the server's to judge.
                if this.gathered.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                this.handing_out = Some(0);
            } else if this.gathered.len() == this.wanted() {
                match frame(&this.gathered) {
                    Some((length, HEADERS)) if length <= MAX_FRAME => clean(&mut this.gathered),
                    Some((length, _)) => this.pass = length,
                    None => {}
                }
                this.handing_out = Some(0);
            }
        }
    }
}

/// Cleans a whole HEADERS frame.
fn clean(frame: &mut [u8]) {
    let flags = frame[4];
    let mut at = FRAME_HEADER;
    let mut end = frame.len();
    if flags & PADDED != 0 {
        let padding = frame.get(at).copied().unwrap_or(0);
        end = end.saturating_sub(usize::from(padding));
        at += 1;
    }
    if flags & PRIORITY != 0 {
        at += 5;
    }
    if let Some(block) = frame.get_mut(at..end) {
        clean_block(block);
    }
}

/// Walks a header block (RFC 7541, section 6) and makes a plain literal value of `:authority` a host name. Stops where
/// the block is malformed; the server rejects it.
fn clean_block(block: &mut [u8]) {
    /// The index of `:authority` in the static table.
    const AUTHORITY: usize = 1;
    let mut at = 0;
    while let Some(first) = block.get(at).copied() {
        let prefix = match first {
            // An indexed field, and a change of the table's size: a number and nothing else.
            0x80.. => 7,
            0x20..=0x3f => 5,
            // A literal, to be indexed or not.
            0x40..=0x7f => 6,
            0x00..=0x1f => 4,
        };
        let Some((index, next)) = number(block, at, prefix) else { return };
        at = next;
        if matches!(first, 0x80.. | 0x20..=0x3f) {
            continue;
        }
        let mut is_authority = index == AUTHORITY;
        if index == 0 {
            let Some((huffman, start, end)) = string(block, at) else { return };
            is_authority = !huffman && &block[start..end] == b":authority";
            at = end;
        }
        let Some((huffman, start, end)) = string(block, at) else { return };
        if is_authority && !huffman {
            let is_of_a_host = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
            block[start..end].iter_mut().filter(|byte| !is_of_a_host(byte)).for_each(|byte| *byte = b'-');
        }
        at = end;
    }
}

/// An integer with an n-bit prefix (section 5.1), and where it ends.
fn number(block: &[u8], at: usize, prefix: u32) -> Option<(usize, usize)> {
    let most = (1usize << prefix) - 1;
    let mut value = usize::from(*block.get(at)?) & most;
    let mut next = at + 1;
    if value == most {
        for shift in (0..28).step_by(7) {
            let byte = usize::from(*block.get(next)?);
            next += 1;
            value += (byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some((value, next));
            }
        }
        return None;
    }
    Some((value, next))
}

/// A string (section 5.2): whether it is Huffman-coded, where it begins and where it ends.
fn string(block: &[u8], at: usize) -> Option<(bool, usize, usize)> {
    let huffman = block.get(at)? & 0x80 != 0;
    let (length, start) = number(block, at, 7)?;
    let end = start.checked_add(length).filter(|end| *end <= block.len())?;
    Some((huffman, start, end))
}

impl AsyncWrite for Tolerant {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

impl Connected for Tolerant {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// `:method POST` by index, `:authority` as a literal with its name by index and with its name in
    /// letters (as gRPC core sends it), `x-%: %` with a literal name, a never-indexed `:path`, and a
    /// value longer than a one-byte length.
    fn block(authority: &[u8]) -> Vec<u8> {
        let mut block = vec![0x83, 0x41, authority.len() as u8];
        block.extend(authority);
        block.extend([0x40, 10]);
        block.extend(b":authority");
        block.push(authority.len() as u8);
        block.extend(authority);
        block.extend([0x00, 3, b'x', b'-', b'%', 1, b'%']);
        block.extend([0x14, 5, b'/', b'%', b'2', b'F', b'x']);
        block.extend([0x40, 1, b'y', 0x7f, 200 - 127]);
        block.extend([b'%'; 200]);
        block
    }

    #[test]
    fn only_the_value_of_the_authority_is_cleaned() {
        let mut cleaned = block(b"run%2Fcsi%2Ecsi.sock");
        clean_block(&mut cleaned);
        assert_eq!(cleaned, block(b"run-2Fcsi-2Ecsi.sock"));
        let mut raw = block(b"/run/csi sock:~[\xff");
        clean_block(&mut raw);
        assert_eq!(raw, block(b"-run-csi-sock----"));
        let mut untouched = block(b"localhost");
        clean_block(&mut untouched);
        assert_eq!(untouched, block(b"localhost"));
    }

    #[test]
    fn a_block_cut_short_or_of_noise_is_walked_without_a_panic() {
        let whole = block(b"a%b");
        for length in 0..whole.len() {
            clean_block(&mut whole[..length].to_vec());
        }
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let mut noise = vec![0; 40];
            random.fill(&mut noise);
            clean_block(&mut noise);
            let mut frame = [vec![0, 0, 40, HEADERS, noise[0], 0, 0, 0, 1], noise].concat();
            clean(&mut frame);
        }
    }

    /// However the bytes are cut on their way, the stream that comes out is the one that went in, but
    /// for the authority, in frames with and without padding and priority.
    #[tokio::test]
    async fn frames_pass_whole_whatever_the_cuts() {
        let frame = |kind: u8, flags: u8, payload: &[u8]| {
            let length = (payload.len() as u32).to_be_bytes();
            [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
        };
        let stream = |authority: &[u8]| {
            let plain = block(authority);
            let padded = [&[2u8][..], &plain, b"%%"].concat();
            let with_priority = [&[0x25u8; 5][..], &plain].concat();
            [
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
                frame(4, 0, &[0, 3, 0, 0, 0, 0x25]),
                frame(HEADERS, 4, &plain),
                frame(0, 1, &[b'%'; 3000]),
                frame(HEADERS, 4 | PADDED, &padded),
                frame(HEADERS, 4 | PRIORITY, &with_priority),
                frame(0, 1, b""),
            ]
            .concat()
        };
        let (sent, expected) = (stream(b"tmp%2Fs"), stream(b"tmp-2Fs"));
        for cut in [1, 2, 7, 9, 64, 4096] {
            let (mut client, server) = UnixStream::pair().expect("pair");
            let bytes = sent.clone();
            let writer = tokio::spawn(async move {
                for part in bytes.chunks(cut) {
                    client.write_all(part).await.expect("write");
                }
            });
            let mut received: Vec<u8> = Vec::new();
            let mut tolerant = Tolerant::new(server);
            let mut buffer = vec![0; cut];
            loop {
                let count = tolerant.read(&mut buffer).await.expect("read");
                if count == 0 {
                    break;
                }
                received.extend(&buffer[..count]);
            }
            writer.await.expect("writer");
            assert!(received == expected, "cut at {cut}");
        }
    }
}
