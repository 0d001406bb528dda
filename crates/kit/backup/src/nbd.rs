//! A backup as a block device that can be read: an NBD server on a UNIX socket, in the fixed newstyle of the protocol. It
//! knows no writes. Clients that ask for structured replies may also ask which parts hold data (`base:allocation`), and need
//! not read the others.

use std::fs::TryLockError;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::Stop;
use files::Context;

use crate::error::{Error, Result, refused};

pub use export::Export;

mod export;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
const STRUCTURED_REPLY: u32 = 0x668e_33ef;
/// Handshake: fixed newstyle, no zeros behind the answer to EXPORT_NAME.
const HANDSHAKE: u16 = 0b11;
/// Export: there are flags, it is read-only, and several connections see the same.
const EXPORT: u16 = 1 | 1 << 1 | 1 << 8;
/// The longest read that is answered.
const LONGEST: u32 = 32 << 20;
/// The longest option that is read: a name of 4096 bytes is the longest that the protocol has.
const LONGEST_OPTION: u32 = 8192;
/// The one thing that can be asked about a range, and the number that it has in replies.
const ALLOCATION: &str = "base:allocation";
const ALLOCATION_ID: u32 = 1;
/// The most parts that one reply describes.
const LONGEST_STATUS: usize = 4096;
/// Connections at once.
const CONNECTIONS: usize = 16;
/// The preferred size of a read, which is sent to clients: 256 KiB.
const PREFERRED: u32 = 256 << 10;

/// A part of a range: its length, and whether it holds data.
pub type Status = (u64, bool);

/// What is served. Ranges are whole sectors, and inside.
pub trait Disk: Send + Sync + 'static {
    fn name(&self) -> &str;
    /// Bytes, in whole sectors.
    fn size(&self) -> u64;
    /// Bytes: 512 or 4096.
    fn sector(&self) -> u32;
    fn read(&self, offset: u64, length: u32) -> Result<Vec<u8>>;
    /// The first parts of a range, at most `most`.
    fn status(&self, offset: u64, length: u32, most: usize) -> Result<Vec<Status>>;
}

/// Serves until `stop` is set. The socket is made, and removed in the end.
pub fn serve(disk: impl Disk, socket: &Path, stop: &Stop) -> Result<()> {
    let listener = listen(socket, stop)?;
    let _gone = Socket::of(socket)?;
    files::change::set_mode(socket, 0o600)?;
    listener.set_nonblocking(true).context("listen at", socket)?;
    shell::say!(
        "cbt-backup: {} is served, read-only, at nbd+unix:///?socket={}; Ctrl-C ends it",
        disk.name(),
        socket.display()
    );
    let disk = Arc::new(disk);
    let open = Arc::new(AtomicUsize::new(0));
    while stop.check().is_ok() {
        match listener.accept() {
            Ok((mut stream, _)) if open.load(Ordering::Relaxed) < CONNECTIONS => {
                let (disk, open) = (disk.clone(), open.clone());
                open.fetch_add(1, Ordering::Relaxed);
                let talk = move || {
                    match stream.set_nonblocking(false).and_then(|()| talk(&*disk, &mut stream)) {
                        Err(error) if error.kind() != ErrorKind::UnexpectedEof => {
                            tracing::warn!("a client's connection ended: {error}");
                        }
                        _ => {}
                    }
                    open.fetch_sub(1, Ordering::Relaxed);
                };
                let spawned = std::thread::Builder::new().name("nbd".into()).spawn(talk);
                spawned.context("start a thread for", socket)?;
            }
            Ok((stream, _)) => drop(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(20))
            }
            Err(error) => return Err(error).context("accept at", socket).map_err(Error::from),
        }
    }
    Ok(())
}

/// The file of a socket, and which one it is: another process may have its name by now.
struct Socket(PathBuf, (u64, u64));

impl Socket {
    fn of(path: &Path) -> Result<Self> {
        Ok(Socket(path.to_owned(), identity(path).context("look at", path)?))
    }
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|of| (of.dev(), of.ino()))
}

impl Drop for Socket {
    fn drop(&mut self) {
        if identity(&self.0).is_ok_and(|there| there == self.1) {
            let _ = files::change::remove_file(&self.0);
        }
    }
}

/// Listens; a socket that a process has left which is gone is replaced.
fn listen(socket: &Path, stop: &Stop) -> Result<UnixListener> {
    use std::os::unix::fs::FileTypeExt;
    if std::fs::symlink_metadata(socket).is_ok_and(|found| !found.file_type().is_socket()) {
        return Err(refused!(
            "listen at {}: a file that is not a socket is there: move it away",
            socket.display()
        ));
    }
    // Of two servers that find the same old socket, the second would remove the new one of the first. So one looks at a time; where the
    // filesystem has no locks, that stays possible.
    let parent = socket.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let dir = std::fs::File::open(parent).context("open", parent)?;
    while matches!(dir.try_lock(), Err(TryLockError::WouldBlock)) {
        stop.check()?;
        std::thread::sleep(Duration::from_millis(20));
    }
    if UnixStream::connect(socket).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
        files::change::remove_file(socket)?;
    }
    Ok(files::step("listen at", socket, || UnixListener::bind(socket))?)
}

fn number<const N: usize>(stream: &mut (impl Read + Write)) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn garbage(what: &str) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, what.to_owned())
}

/// One client: the handshake, then its requests.
fn talk(disk: &impl Disk, stream: &mut (impl Read + Write)) -> std::io::Result<()> {
    stream.write_all(
        &[MAGIC.to_be_bytes().as_slice(), &OPTION.to_be_bytes(), &HANDSHAKE.to_be_bytes()].concat(),
    )?;
    let flags = u32::from_be_bytes(number(stream)?);
    if flags & 1 == 0 {
        return Err(garbage("it does not speak the fixed newstyle of the protocol"));
    }
    match shake(disk, stream, flags & 2 != 0)? {
        Some(agreed) => requests(disk, stream, agreed),
        None => Ok(()),
    }
}

/// What a client and this server have agreed on.
#[derive(Clone, Copy, Debug, Default)]
struct Agreed {
    is_structured: bool,
    /// The client may ask which parts hold data.
    tells_allocation: bool,
}

/// The queries of an option about contexts, where it is well-formed; the name before them is left to the caller.
fn queries(content: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    fn text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        rest.split_at_checked(u32::from_be_bytes(*length) as usize)
    }
    let (name, rest) = text(content)?;
    let (count, mut rest) = rest.split_first_chunk::<4>()?;
    let mut found = Vec::new();
    for _ in 0..u32::from_be_bytes(*count) {
        let query;
        (query, rest) = text(rest)?;
        found.push(query);
    }
    rest.is_empty().then_some((name, found))
}

/// Options until one begins the transmission; `None` where the client ends it.
fn shake(
    disk: &impl Disk,
    stream: &mut (impl Read + Write),
    no_zeros: bool,
) -> std::io::Result<Option<Agreed>> {
    const ACK: u32 = 1;
    const SERVER: u32 = 2;
    const INFO: u32 = 3;
    const CONTEXT: u32 = 4;
    const UNSUPPORTED: u32 = 0x8000_0001;
    const INVALID: u32 = 0x8000_0003;
    const UNKNOWN: u32 = 0x8000_0006;
    let name = disk.name();
    let is_known = |asked: &[u8]| asked.is_empty() || asked == name.as_bytes();
    let mut agreed = Agreed::default();
    loop {
        if u64::from_be_bytes(number(stream)?) != OPTION {
            return Err(garbage("this is not an option"));
        }
        let option = u32::from_be_bytes(number(stream)?);
        let length = u32::from_be_bytes(number(stream)?);
        if length > LONGEST_OPTION {
            return Err(garbage("an option is too long"));
        }
        let mut content = vec![0; length as usize];
        stream.read_exact(&mut content)?;
        let mut reply = |kind: u32, content: &[u8]| {
            let head =
                [OPTION_REPLY.to_be_bytes().as_slice(), &option.to_be_bytes(), &kind.to_be_bytes()].concat();
            stream.write_all(&[&head, (content.len() as u32).to_be_bytes().as_slice(), content].concat())
        };
        match option {
            // EXPORT_NAME: it has no way to say no but the end of the connection.
            1 if is_known(&content) => {
                let zeros = [0; 124];
                let zeros = if no_zeros { &zeros[..0] } else { &zeros[..] };
                stream.write_all(
                    &[disk.size().to_be_bytes().as_slice(), &EXPORT.to_be_bytes(), zeros].concat(),
                )?;
                return Ok(Some(agreed));
            }
            1 => return Err(garbage("it asks for an export of another name")),
            // ABORT
            2 => {
                reply(ACK, &[])?;
                return Ok(None);
            }
            // LIST
            3 => {
                reply(SERVER, &[(name.len() as u32).to_be_bytes().as_slice(), name.as_bytes()].concat())?;
                reply(ACK, &[])?;
            }
            // INFO and GO
            6 | 7 => {
                let asked = content.split_first_chunk::<4>();
                let asked = asked.and_then(|(length, rest)| rest.get(..u32::from_be_bytes(*length) as usize));
                match asked {
                    None => reply(INVALID, b"the option is cut short")?,
                    Some(asked) if !is_known(asked) => reply(UNKNOWN, b"there is no such export")?,
                    Some(_) => {
                        let (kind, size, flags) =
                            (0u16.to_be_bytes(), disk.size().to_be_bytes(), EXPORT.to_be_bytes());
                        reply(INFO, &[kind.as_slice(), &size, &flags].concat())?;
                        let blocks = [disk.sector(), PREFERRED, LONGEST].map(u32::to_be_bytes).concat();
                        reply(INFO, &[3u16.to_be_bytes().as_slice(), &blocks].concat())?;
                        reply(ACK, &[])?;
                        if option == 7 {
                            return Ok(Some(agreed));
                        }
                    }
                }
            }
            // STRUCTURED_REPLY
            8 if content.is_empty() => {
                agreed.is_structured = true;
                reply(ACK, &[])?;
            }
            // LIST_META_CONTEXT and SET_META_CONTEXT
            9 | 10 if agreed.is_structured => match queries(&content) {
                None => reply(INVALID, b"the option is cut short")?,
                Some((asked, _)) if !is_known(asked) => reply(UNKNOWN, b"there is no such export")?,
                Some((_, queries)) => {
                    let is_list = option == 9;
                    let is_asked =
                        |query: &&[u8]| *query == ALLOCATION.as_bytes() || is_list && *query == b"base:";
                    let is_named = is_list && queries.is_empty() || queries.iter().any(is_asked);
                    if is_named {
                        let id = if is_list { 0 } else { ALLOCATION_ID };
                        reply(CONTEXT, &[&id.to_be_bytes(), ALLOCATION.as_bytes()].concat())?;
                    }
                    agreed.tells_allocation = if is_list { agreed.tells_allocation } else { is_named };
                    reply(ACK, &[])?;
                }
            },
            8..=10 => reply(INVALID, b"structured replies come first, and have no content")?,
            _ => reply(UNSUPPORTED, &[])?,
        }
    }
}

/// What a request is answered with.
enum Answer {
    Bytes(Vec<u8>),
    Parts(Vec<Status>),
    Error(u32),
}

impl Answer {
    /// As it is sent to a client: a head, and the bytes that were read. With structured replies all is one chunk.
    fn encode(self, is_structured: bool, cookie: [u8; 8], offset: u64) -> (Vec<u8>, Vec<u8>) {
        const DONE: u16 = 1;
        const DATA: u16 = 1;
        const STATUS: u16 = 5;
        const ERROR: u16 = 1 << 15 | 1;
        let (error, parts, bytes) = match self {
            Answer::Bytes(bytes) => (0, Vec::new(), bytes),
            Answer::Parts(parts) => (0, parts, Vec::new()),
            Answer::Error(error) => (error, Vec::new(), Vec::new()),
        };
        if !is_structured {
            return ([&REPLY.to_be_bytes(), &error.to_be_bytes(), &cookie[..]].concat(), bytes);
        }
        // Without data: a hole that reads as zeros.
        let part = |(length, is_data): &Status| {
            let flags: u32 = if *is_data { 0 } else { 0b11 };
            [(*length as u32).to_be_bytes(), flags.to_be_bytes()].concat()
        };
        let (kind, start): (u16, Vec<u8>) = match (error, parts.is_empty(), bytes.is_empty()) {
            (0, true, true) => (0, Vec::new()),
            (0, true, false) => (DATA, offset.to_be_bytes().into()),
            (0, false, _) => {
                (STATUS, ALLOCATION_ID.to_be_bytes().into_iter().chain(parts.iter().flat_map(part)).collect())
            }
            // Without words.
            (error, ..) => (ERROR, [&error.to_be_bytes()[..], &[0, 0]].concat()),
        };
        let length = ((start.len() + bytes.len()) as u32).to_be_bytes();
        let (magic, flags, kind) = (STRUCTURED_REPLY.to_be_bytes(), DONE.to_be_bytes(), kind.to_be_bytes());
        ([&magic, &flags[..], &kind, &cookie, &length, &start].concat(), bytes)
    }
}

fn requests(disk: &impl Disk, stream: &mut (impl Read + Write), agreed: Agreed) -> std::io::Result<()> {
    const NOT_PERMITTED: u32 = 1;
    const IO: u32 = 5;
    const INVALID: u32 = 22;
    /// The first part alone is asked for.
    const ONE: u16 = 1 << 3;
    loop {
        if u32::from_be_bytes(number(stream)?) != REQUEST {
            return Err(garbage("this is not a request"));
        }
        let flags = u16::from_be_bytes(number(stream)?);
        let command = u16::from_be_bytes(number(stream)?);
        let cookie: [u8; 8] = number(stream)?;
        let offset = u64::from_be_bytes(number(stream)?);
        let length = u32::from_be_bytes(number(stream)?);
        let sector = u64::from(disk.sector());
        let is_aligned = offset.is_multiple_of(sector) && u64::from(length).is_multiple_of(sector);
        let is_inside = offset.checked_add(length.into()).is_some_and(|end| end <= disk.size());
        let made = match command {
            // READ
            0 if is_inside && is_aligned && length <= LONGEST => disk.read(offset, length).map(Answer::Bytes),
            // BLOCK_STATUS
            7 if is_inside && is_aligned && length > 0 && agreed.tells_allocation => {
                let most = if flags & ONE == 0 { LONGEST_STATUS } else { 1 };
                disk.status(offset, length, most).map(Answer::Parts)
            }
            // DISCONNECT
            2 => return Ok(()),
            // WRITE brings its bytes along.
            1 => {
                std::io::copy(&mut Read::take(&mut *stream, length.into()), &mut std::io::sink())?;
                Ok(Answer::Error(NOT_PERMITTED))
            }
            _ => Ok(Answer::Error(INVALID)),
        };
        let answer = made.unwrap_or_else(|error| {
            let why = shell::plain(&base::report(&error));
            shell::say!("cbt-backup: {length} bytes at {offset}: {why}");
            Answer::Error(IO)
        });
        let (head, bytes) = answer.encode(agreed.is_structured, cookie, offset);
        stream.write_all(&head)?;
        stream.write_all(&bytes)?;
    }
}
