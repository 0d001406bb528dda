//! Data tokens: each is good for the bytes of one block of one snapshot, for a while, in anybody's hands. And where those bytes are.
//! No list of tokens is kept, so none can be revoked: they are short-lived.

use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use proto::deltas::BlockSnapshotChangedBlockToken;
use serde::{Deserialize, Serialize};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt, Take};
use tonic::Status;

/// The placeholder of the snapshot's handle in a path.
pub const PLACEHOLDER: &str = "{snapshot}";
/// What the key is used for: another use of the same file gives another key.
const CONTEXT: &str = "deltapath 2026-11 cbt-earlier data token";
const KEY_LENGTH: usize = 32;

/// Makes tokens and checks them. The same key on all replicas makes a token good at each.
#[derive(Clone)]
pub struct Tokens {
    key: [u8; blake3::KEY_LEN],
    driver: String,
    ttl: Duration,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub snapshot: String,
    /// First byte.
    pub offset: u64,
    /// In bytes.
    pub size: u64,
    /// Seconds since 1970.
    expires: u64,
}

impl Tokens {
    /// With the key in a file, for the snapshots of a driver.
    pub fn new(key: &Path, driver: &str, ttl: Duration) -> Result<Self, String> {
        let bytes = std::fs::read(key)
            .map_err(|error| format!("read {} (--data-token-key): {error}", key.display()))?;
        if bytes.len() < KEY_LENGTH {
            return Err(format!(
                "{} (--data-token-key) has {} bytes: it must have at least {KEY_LENGTH} random bytes",
                key.display(),
                bytes.len()
            ));
        }
        Ok(Tokens { key: blake3::derive_key(CONTEXT, &bytes), driver: driver.to_owned(), ttl })
    }

    fn sign(&self, claims: &str) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        // With its length, or two pairs could be one text.
        hasher.update(&(self.driver.len() as u64).to_le_bytes());
        hasher.update(self.driver.as_bytes()).update(claims.as_bytes());
        hasher.finalize()
    }

    pub fn seal(&self, snapshot: &str, offset: u64, size: u64) -> BlockSnapshotChangedBlockToken {
        let now = now();
        let expires = now + self.ttl.as_secs();
        let grant = Grant { snapshot: snapshot.to_owned(), offset, size, expires };
        let claims = URL_SAFE_NO_PAD.encode(serde_json::json!(grant).to_string());
        let signature = URL_SAFE_NO_PAD.encode(self.sign(&claims).as_bytes());
        BlockSnapshotChangedBlockToken {
            token: format!("{claims}.{signature}"),
            issuance_time: Some(prost_types::Timestamp {
                seconds: i64::try_from(now).unwrap_or(i64::MAX),
                nanos: 0,
            }),
            ttl_seconds: i32::try_from(self.ttl.as_secs()).unwrap_or(i32::MAX),
        }
    }

    /// What the token is good for, if it is one of ours and not too old.
    pub fn open(&self, token: &str) -> Result<Grant, Status> {
        let forged = || Status::unauthenticated("not a data token of this service");
        let (claims, signature) = token.split_once('.').ok_or_else(forged)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| forged())?;
        let signature = <[u8; blake3::OUT_LEN]>::try_from(signature).map_err(|_| forged())?;
        // Hashes are compared in constant time.
        if self.sign(claims) != blake3::Hash::from_bytes(signature) {
            return Err(forged());
        }
        let claims = URL_SAFE_NO_PAD.decode(claims).map_err(|_| forged())?;
        let grant: Grant = serde_json::from_slice(&claims).map_err(|_| forged())?;
        if grant.expires <= now() {
            return Err(Status::unauthenticated(
                "the data token has expired: ask for the changed blocks again to get a new one",
            ));
        }
        Ok(grant)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Where the bytes of snapshots are: paths of files or devices with a place for the handle, tried in turn.
#[derive(Clone, Debug)]
pub struct Data(pub Vec<String>);

impl Data {
    /// The bytes of the grant; fewer where the snapshot ends before.
    pub async fn read(&self, grant: &Grant) -> Result<Take<File>, Status> {
        // The handle comes from a driver, and becomes a part of a path.
        let handle = &grant.snapshot;
        if handle.is_empty() || handle.starts_with('.') || handle.contains(['/', '\0']) {
            return Err(Status::not_found("the snapshot has no file here: its handle is not a file name"));
        }
        for template in &self.0 {
            let path = PathBuf::from(template.replace(PLACEHOLDER, handle));
            let opened = async {
                let mut file = File::open(&path).await?;
                file.seek(SeekFrom::Start(grant.offset)).await?;
                Ok::<_, std::io::Error>(file.take(grant.size))
            };
            match opened.await {
                Ok(bytes) => return Ok(bytes),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "open a snapshot's data");
                    return Err(Status::internal("the snapshot's data cannot be read: see the log"));
                }
            }
        }
        Err(Status::not_found(format!("the data of snapshot {handle} is not here, or no longer")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(key: u8, driver: &str, ttl: u64) -> Tokens {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), [key; 32]).expect("write");
        Tokens::new(file.path(), driver, Duration::from_secs(ttl)).expect("tokens")
    }

    #[test]
    fn a_token_is_good_for_its_block_and_at_its_driver() {
        let ours = tokens(1, "a", 60);
        let made = ours.seal("s1", 8192, 4096);
        assert_eq!(made.ttl_seconds, 60);
        let grant = ours.open(&made.token).expect("ours");
        assert_eq!((grant.snapshot.as_str(), grant.offset, grant.size), ("s1", 8192, 4096));
        for (what, other) in [("another key", tokens(2, "a", 60)), ("another driver", tokens(1, "b", 60))] {
            assert!(other.open(&made.token).is_err(), "{what}");
        }
        // Every character counts: the claims, the dot and the signature. The last one of a length that is no multiple of
        // four has bits that stand for nothing, and decoding refuses it where they are set.
        for at in 0..made.token.len() {
            let mut forged = made.token.clone().into_bytes();
            forged[at] = if forged[at] == b'A' { b'B' } else { b'A' };
            let forged = String::from_utf8(forged).expect("text");
            assert!(ours.open(&forged).is_err(), "changed at {at}");
        }
        for wrong in ["", ".", "a.b", &made.token[1..], &format!("{}x", made.token)] {
            assert!(ours.open(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_short_key_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), [1; 31]).expect("write");
        let refused = Tokens::new(file.path(), "a", Duration::from_secs(1)).err().expect("refused");
        assert!(refused.contains("31 bytes") && refused.contains("--data-token-key"), "{refused}");
    }

    #[tokio::test]
    async fn a_handle_leads_nowhere_else() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("snapshots")).expect("mkdir");
        std::fs::write(dir.path().join("secret"), b"secret").expect("write");
        std::fs::write(dir.path().join("snapshots/s1"), b"0123456789").expect("write");
        let data = Data(vec![
            format!("{}/missing/{PLACEHOLDER}", dir.path().display()),
            format!("{}/snapshots/{PLACEHOLDER}", dir.path().display()),
        ]);
        let grant =
            |snapshot: &str| Grant { snapshot: snapshot.into(), offset: 4, size: 3, expires: u64::MAX };
        let mut bytes = Vec::new();
        data.read(&grant("s1")).await.expect("data").read_to_end(&mut bytes).await.expect("read");
        assert_eq!(bytes, b"456");
        for other in ["", ".", "..", "../secret", "s1/../../secret", ".hidden", "s2"] {
            let refused = data.read(&grant(other)).await.expect_err("refused");
            assert_eq!(refused.code(), tonic::Code::NotFound, "{other:?}");
        }
    }
}
