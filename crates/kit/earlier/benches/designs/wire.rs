//! Connections that are counted: a go-between that passes bytes on as they are.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Bytes in both directions, of all wires that share it. Those of TLS are among them, those of TCP and IP are not.
pub type Count = Arc<AtomicU64>;

pub struct Wire {
    pub at: SocketAddr,
    to: Arc<Mutex<Option<SocketAddr>>>,
}

impl Wire {
    pub async fn new(ip: IpAddr, count: &Count) -> Self {
        let listener = TcpListener::bind((ip, 0)).await.expect("bind");
        let at = listener.local_addr().expect("an address");
        let to: Arc<Mutex<Option<SocketAddr>>> = Arc::default();
        let (target, count) = (to.clone(), count.clone());
        tokio::spawn(async move {
            loop {
                let (here, _) = listener.accept().await.expect("accept");
                let target = *target.lock().expect("a lock");
                let count = count.clone();
                tokio::spawn(async move {
                    let Some(target) = target else { return };
                    let Ok(there) = TcpStream::connect(target).await else { return };
                    for stream in [&here, &there] {
                        stream.set_nodelay(true).expect("TCP_NODELAY");
                    }
                    join(here.into_split(), there.into_split(), &count).await;
                });
            }
        });
        Wire { at, to }
    }

    pub fn lead_to(&self, to: SocketAddr) {
        *self.to.lock().expect("a lock") = Some(to);
    }
}

pub fn socket(dir: &Path, name: &str, to: &Path, count: &Count) -> PathBuf {
    let path = dir.join(format!("wire-{name}.sock"));
    let listener = UnixListener::bind(&path).expect("bind");
    let (to, count) = (to.to_owned(), count.clone());
    tokio::spawn(async move {
        loop {
            let (here, _) = listener.accept().await.expect("accept");
            let (to, count) = (to.clone(), count.clone());
            tokio::spawn(async move {
                let Ok(there) = UnixStream::connect(to).await else { return };
                join(here.into_split(), there.into_split(), &count).await;
            });
        }
    });
    path
}

async fn join<R, W, S, T>(here: (R, W), there: (S, T), count: &Count)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
    S: AsyncRead + Unpin,
    T: AsyncWrite + Unpin,
{
    tokio::join!(pass(here.0, there.1, count), pass(there.0, here.1, count));
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, count: &Count) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        count.fetch_add(length as u64, Ordering::Relaxed);
        if to.write_all(&bytes[..length]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}
