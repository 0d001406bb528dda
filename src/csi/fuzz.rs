//! Fuzz targets of this layer: bytes from the socket.

use std::cell::LazyCell;

use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::decode;
use crate::driver::AccessType;
use serve::authority::Tolerant;

/// A wire message that decodes becomes a capability or an error, and mount flags never show.
pub(crate) fn capabilities(bytes: &[u8]) {
    let Ok(message) = proto::VolumeCapability::decode(bytes) else { return };
    let asked = message.clone();
    let Ok(capability) = decode::capability(Some(message)) else { return };
    let shown = format!("{capability:?}");
    match (&capability.access, asked.access_type) {
        (AccessType::Mount { fs_type, flags }, Some(proto::volume_capability::AccessType::Mount(mount))) => {
            assert_eq!((fs_type, &flags.0), (&mount.fs_type, &mount.mount_flags));
            let around =
                format!("{:?}", AccessType::Mount { fs_type: fs_type.clone(), flags: Default::default() });
            for flag in mount.mount_flags.iter().filter(|flag| flag.len() > 8 && !around.contains(*flag)) {
                assert!(!shown.contains(flag.as_str()), "{shown} shows the mount flag {flag:?}");
            }
        }
        (AccessType::Block, Some(proto::volume_capability::AccessType::Block(_))) => {}
        (access, asked) => panic!("{asked:?} became {access:?}"),
    }
    // And back from the wire, as it was.
    let mode = capability.mode;
    let named = proto::volume_capability::access_mode::Mode::from_str_name(mode.name()).map(i32::from);
    assert_eq!(named, asked.access_mode.map(|mode| mode.mode));
}

thread_local! {
    static RUNTIME: LazyCell<tokio::runtime::Runtime> = LazyCell::new(|| {
        tokio::runtime::Builder::new_current_thread().enable_io().build().expect("runtime")
    });
}

/// A connection's bytes, after a byte that says how they are cut: they come out unchanged, except bytes that
/// became `-`, and none is lost, whatever frames they claim to be.
pub(crate) fn authority(bytes: &[u8]) {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    // More than a socket takes at once would need a second task.
    let bytes = &bytes[..bytes.len().min(32 << 10)];
    let mut out = Vec::new();
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let (mut client, server) = UnixStream::pair().expect("a pair");
            let mut server = Tolerant::new(server);
            for chunk in bytes.chunks(usize::from(*cut).max(1) * 8) {
                client.write_all(chunk).await.expect("write");
            }
            drop(client);
            let mut buffer = vec![0; usize::from(*cut) + 1];
            loop {
                match server.read(&mut buffer).await.expect("read") {
                    0 => break,
                    count => out.extend_from_slice(&buffer[..count]),
                }
            }
        });
    });
    assert_eq!(out.len(), bytes.len());
    let of_a_host = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    let same = |(sent, got): (&u8, &u8)| sent == got || (!of_a_host(*sent) && *got == b'-');
    assert!(bytes.iter().zip(&out).all(same), "bytes of a host name were changed");
}
