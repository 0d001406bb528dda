//! The storage below a repository: a directory or a bucket, through one interface. Calls block; they are made by plain
//! threads. Nothing here knows what an object is for.
//!
//! In a directory anybody may have left a symbolic link, a FIFO or a file of another name. A directory at the top may be a link, to
//! another disk; below it no link is followed, and an object is a plain file ([`Store::check`]).

use std::fs::Metadata;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use base::Stop;
use bytes::Bytes;
use files::{AlignedBuffer, change, durable};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key, S3ConditionalPut};
use object_store::local::LocalFileSystem;
use object_store::path::Path as Name;
use object_store::prefix::PrefixStore;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion,
};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::directory::{create_file, meta, walk, write_large};
use super::patience::{self, BySize};
use crate::block::BLOCK;
use crate::device::Device;
use crate::error::{Error, Result, refused};
use crate::wait::{unless, wait};

/// From this length on what is read of a directory's object, or written as one, bypasses the page cache, which it would
/// only pass through.
const LARGE: u64 = 256 << 10;

/// Objects that are read at once, where each is small, and their bytes where they are not.
const AT_ONCE: u64 = 128;
const AT_ONCE_BYTES: u64 = 64 << 20;

/// What writes under way have left when a command is stopped: with what follows, less than a pod's 30 seconds.
const LAST: Duration = Duration::from_secs(10);
/// What each write has that is begun later, such as the removal of the lock.
const LEAST: Duration = Duration::from_secs(1);

/// A directory or a bucket.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<dyn ObjectStore>,
    runtime: Handle,
    /// Ends what reads at once, and what writes after [`LAST`].
    stop: Stop,
    /// When a write first saw the stop.
    stopped: Arc<OnceLock<Instant>>,
    /// Where it is a directory.
    dir: Option<PathBuf>,
}

impl Store {
    /// Opens `DIR` or `s3://BUCKET/PREFIX`. A directory that is missing is made if `create`.
    pub fn open(url: &str, create: bool, runtime: &Handle, stop: &Stop) -> Result<Self> {
        let wrong = |why: String| refused!("the repository {url:?}: {why}");
        if let Some(place) = url.strip_prefix("s3://") {
            let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
            // reqwest takes the provider of the process.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let _entered = runtime.enter();
            let builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
            let builder = builder.with_http_connector(BySize).with_retry(patience::retries());
            let builder = builder.with_conditional_put(S3ConditionalPut::ETagMatch);
            let is_signed = builder.get_config_value(&Key::SkipSignature).as_deref() != Some("true");
            if is_signed && !has_credentials(&builder) && !may_ask_the_machine() {
                return Err(wrong(
                    "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
                     AWS_EC2_METADATA_DISABLED=false to use the role of the cloud's machine"
                        .into(),
                ));
            }
            if let Some(token) = builder.get_config_value(&Key::WebIdentityTokenFile).filter(|_| is_signed) {
                // It is read by a thread that no signal ends.
                crate::device::no_wait(Path::new(&token))?;
            }
            let s3 = builder.build().map_err(|error| wrong(error.to_string()))?;
            if is_signed {
                let found = wait(runtime, stop, s3.credentials().get_credential())?;
                found.map_err(|error| wrong(format!("no credentials: {}", base::report(&error))))?;
            }
            let inner: Arc<dyn ObjectStore> = match prefix.trim_matches('/') {
                "" => Arc::new(s3),
                prefix => Arc::new(PrefixStore::new(s3, prefix)),
            };
            return Ok(Self::of(inner, None, runtime, stop));
        }
        let dir = Path::new(url);
        if dir.exists() && !dir.is_dir() {
            return Err(wrong("it is a file, not a directory".into()));
        } else if create {
            change::create_dir_all(dir)?;
        } else if !dir.is_dir() {
            return Err(wrong("there is no such directory; the first backup makes it".into()));
        }
        // An object is a file that is written under another name, synced and renamed; then its directory is synced.
        let local = LocalFileSystem::new_with_prefix(dir).map_err(|error| wrong(error.to_string()))?;
        Ok(Self::of(Arc::new(local.with_fsync(true)), Some(dir.to_owned()), runtime, stop))
    }

    fn of(inner: Arc<dyn ObjectStore>, dir: Option<PathBuf>, runtime: &Handle, stop: &Stop) -> Self {
        Store { inner, runtime: runtime.clone(), stop: stop.clone(), stopped: Arc::default(), dir }
    }

    /// The directory, where it is one.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// What ends a command, which looks at it while it works.
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// The runtime on which requests are made.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Writes an object, durably and as one step: under its name there is nothing of it, or all. One that is there
    /// already is replaced. Quicker where the parts are aligned to [`ALIGN`].
    pub async fn put(&self, name: &str, parts: Vec<Bytes>) -> Result<()> {
        self.check(name, false)?;
        if let Some(dir) = &self.dir
            && parts.iter().map(|part| part.len() as u64).sum::<u64>() >= LARGE
        {
            let (dir, path) = (dir.clone(), dir.join(name));
            let written = self.runtime.spawn_blocking(move || write_large(&dir, &path, &parts));
            return self.in_time(written).await?.map_err(|error| refused!("write {name}: {error}"))?;
        }
        let name = Name::from(name);
        let done = self.in_time(self.inner.put(&name, PutPayload::from_iter(parts))).await?;
        done.map(drop).map_err(failed("write", &name))
    }

    /// The same, and `false` where the name is taken. No two writers have the same bytes for a name, so that where they are
    /// there all the same they are of a try whose answer was lost.
    pub fn create(&self, name: &str, bytes: Vec<u8>) -> Result<bool> {
        self.check(name, false)?;
        if let Some(dir) = &self.dir {
            let (dir, path) = (dir.clone(), dir.join(name));
            let made = self.runtime.spawn_blocking(move || create_file(&dir, &path, &bytes));
            let made = self.runtime.block_on(self.in_time(made))?;
            return made.map_err(|error| refused!("write {name}: {error}"))?;
        }
        let bytes = Bytes::from(bytes);
        let path = Name::from(name);
        let put = self.inner.put_opts(&path, bytes.clone().into(), PutMode::Create.into());
        let Err(error) = self.runtime.block_on(self.in_time(put))? else { return Ok(true) };
        let there = self.runtime.block_on(self.in_time(self.get_whole(name, bytes.len())))?;
        if there.is_ok_and(|there| there == bytes) {
            return Ok(true);
        }
        match error {
            object_store::Error::AlreadyExists { .. } => Ok(false),
            error => Err(failed("write", &path)(error)),
        }
    }

    /// Writes an object again, and `false` where it is gone: then it stays gone, and no one sees it come back.
    pub fn rewrite(&self, name: &str, bytes: &[u8], within: Duration) -> Result<bool> {
        let name = Name::from(name);
        let rewrite = async { timeout(within, self.try_rewrite(&name, bytes)).await };
        match self.runtime.block_on(self.in_time(rewrite))? {
            Ok(done) => done.map_err(failed("write", &name)),
            Err(_) => Err(refused!("{name} could not be written in {} s", within.as_secs())),
        }
    }

    async fn try_rewrite(&self, name: &Name, bytes: &[u8]) -> object_store::Result<bool> {
        let payload = || PutPayload::from(bytes.to_vec());
        let Some(there) = self.head(name).await? else { return Ok(false) };
        let version = UpdateVersion { e_tag: there.e_tag, version: there.version };
        if self.inner.put_opts(name, payload(), PutMode::Update(version).into()).await.is_ok() {
            return Ok(true);
        }
        // It is gone by now, or changed by a try whose answer was lost, or the storage knows no such condition.
        match self.head(name).await? {
            Some(_) => self.inner.put(name, payload()).await.map(|_| true),
            None => Ok(false),
        }
    }

    async fn head(&self, name: &Name) -> object_store::Result<Option<ObjectMeta>> {
        match self.inner.head(name).await {
            Ok(there) => Ok(Some(there)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether there is an object.
    pub fn exists(&self, name: &str) -> Result<bool> {
        let name = Name::from(name);
        let there = self.wait(self.head(&name))?;
        there.map(|there| there.is_some()).map_err(failed("find", &name))
    }

    /// [`Store::put`] of one part.
    pub fn replace(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        self.runtime.block_on(self.put(name, vec![bytes.into()]))
    }

    /// What is read, here or elsewhere, unless the command is stopped before.
    pub fn wait<T>(&self, read: impl Future<Output = T>) -> Result<T> {
        wait(&self.runtime, &self.stop, read)
    }

    /// What a write comes to. It is given up only where the command was stopped and the time that is left then is over.
    async fn in_time<T>(&self, write: impl Future<Output = T>) -> Result<T> {
        let begun = Instant::now();
        let is_late = || {
            self.stop.check().is_err() && {
                let stopped = *self.stopped.get_or_init(Instant::now);
                stopped.elapsed() > LAST && begun.elapsed() > LEAST
            }
        };
        unless(is_late, write).await
    }

    /// A whole object of at most so many bytes.
    pub fn get(&self, name: &str, most: usize) -> Result<Vec<u8>> {
        self.wait(self.get_whole(name, most))?
    }

    async fn get_whole(&self, name: &str, most: usize) -> Result<Vec<u8>> {
        self.check(name, true)?;
        let name = Name::from(name);
        // No more of it is read than may be there, whatever its length.
        let options = GetOptions::new().with_range(Some(GetRange::Bounded(0..most as u64 + 1)));
        let got = async {
            let got = self.inner.get_opts(&name, options).await?;
            Ok::<_, object_store::Error>((got.meta.size, got.bytes().await?))
        };
        match got.await {
            Ok((size, _)) if size > most as u64 => {
                Err(Error::damaged(name.to_string(), format!("it has {size} bytes, and may have {most}")))
            }
            Ok((_, bytes)) => Ok(bytes.into()),
            Err(error) => Err(self.unread(&name, 0..1, error).await),
        }
    }

    /// What it means that a part of an object cannot be read: it is damaged where it is too short for it.
    async fn unread(&self, name: &Name, range: Range<u64>, error: object_store::Error) -> Error {
        match (&error, self.head(name).await) {
            (object_store::Error::NotFound { .. }, _) => failed("read", name)(error),
            (_, Ok(Some(there))) if there.size < range.end => {
                let why = match there.size {
                    0 => "it is empty".to_owned(),
                    size => format!("it has {size} bytes, and {} are needed", range.end),
                };
                Error::damaged(name.to_string(), why)
            }
            _ => failed("read", name)(error),
        }
    }

    /// Whole objects, many at once, each handed to `take` as it comes; the results are in the order of the names.
    pub fn get_each<T>(
        &self,
        names: &[ObjectMeta],
        most: usize,
        take: impl Fn(&ObjectMeta, Result<Vec<u8>>) -> T,
    ) -> Result<Vec<T>> {
        let largest = names.iter().map(|of| of.size).max().unwrap_or(0).max(1);
        let at_once = (AT_ONCE_BYTES / largest).clamp(1, AT_ONCE) as usize;
        let take = &take;
        let get = |of| async move { take(of, self.get_whole(of.location.as_ref(), most).await) };
        self.wait(stream::iter(names).map(get).buffered(at_once).collect())
    }

    /// Part of an object; an error where it is shorter.
    pub fn get_range(&self, name: &str, range: Range<u64>) -> Result<Bytes> {
        self.check(name, true)?;
        let name = Name::from(name);
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let bytes = self.wait(async {
            let bytes = self.inner.get_range(&name, range.clone()).await;
            match bytes {
                Ok(bytes) => Ok(bytes),
                Err(error) => Err(self.unread(&name, range.clone(), error).await),
            }
        })??;
        match bytes.len() as u64 == range.end - range.start {
            true => Ok(bytes),
            false => Err(Error::damaged(name.to_string(), "it is shorter than it was")),
        }
    }

    /// The same into a buffer, and quicker where the part is large.
    pub fn read_into<'b>(
        &self,
        name: &str,
        range: Range<u64>,
        buffer: &'b mut AlignedBuffer,
    ) -> Result<&'b [u8]> {
        self.check(name, true)?;
        let length = (range.end - range.start) as usize;
        let device = match &self.dir {
            Some(dir) if length as u64 >= LARGE => Device::open(&dir.join(name)).ok(),
            _ => None,
        };
        // A part that is missing or too short is an error of `get_range`.
        let Some(device) = device.filter(|device| device.size() >= range.end) else {
            let bytes = self.get_range(name, range)?;
            let part = buffer.part(length);
            part.copy_from_slice(&bytes);
            return Ok(part);
        };
        let start = range.start / BLOCK * BLOCK;
        let before = (range.start - start) as usize;
        let part = buffer.part((before + length).next_multiple_of(BLOCK as usize));
        device.read(start, part)?;
        Ok(&part[before..before + length])
    }

    /// An error where what a directory has under this name is not ours to read or to change: below its top a directory that is a
    /// symbolic link, and an object to be read that is not a plain file. What is missing is an error of the call itself.
    pub fn check(&self, name: &str, is_read: bool) -> Result<()> {
        let Some(mut path) = self.dir.clone() else { return Ok(()) };
        for (depth, part) in name.split('/').enumerate() {
            path.push(part);
            let found = if depth == 0 { path.metadata() } else { path.symlink_metadata() };
            let Ok(found) = found else { return Ok(()) };
            let is_object = depth == name.matches('/').count();
            let why = match is_object {
                false if found.is_symlink() => "is a symbolic link, which is not followed",
                true if is_read && !found.is_file() => "is not a plain file",
                _ => continue,
            };
            return Err(Error::damaged(name, format!("{} {why}", path.display())));
        }
        Ok(())
    }

    /// The objects of a directory at the top, and those of directories in it. What does not have one of our names is not an object.
    pub fn list(&self, top: &str) -> Result<Vec<ObjectMeta>> {
        let name = Name::from(top);
        let mut found: Vec<ObjectMeta> = match &self.dir {
            Some(_) => self.files(top)?.into_iter().map(|(name, found)| meta(&name, &found)).collect(),
            None => self.wait(self.objects(&name))??,
        };
        found.retain(|object| super::names::is_ours(object.location.as_ref()));
        found.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(found)
    }

    async fn objects(&self, name: &Name) -> Result<Vec<ObjectMeta>> {
        let mut found: Vec<ObjectMeta> = Vec::new();
        // An object that comes again means that the list never ends. Its place moves up, so that a loop anywhere comes to it.
        let mut mark = 0;
        let mut listed = self.inner.list(Some(name));
        while let Some(object) = listed.try_next().await.map_err(failed("list", name))? {
            if found.get(mark).is_some_and(|seen: &ObjectMeta| seen.location == object.location) {
                return Err(refused!(
                    "list {name}: the server lists {} twice, so its list may never end",
                    object.location
                ));
            }
            if found.len().is_power_of_two() {
                mark = found.len();
            }
            found.push(object);
        }
        Ok(found)
    }

    /// All files in a directory at the top, and in the directories of packs in it; of no name, what lies at the top.
    pub fn files(&self, top: &str) -> Result<Vec<(String, Metadata)>> {
        let Some(dir) = self.dir.clone() else { return Ok(Vec::new()) };
        let top = top.to_owned();
        let walked = self.wait(self.runtime.spawn_blocking(move || {
            let mut found = Vec::new();
            walk(&dir, &top, top == "packs", &mut found).map(|()| found)
        }))?;
        walked.map_err(|error| refused!("list: {error}"))?
    }

    /// The names of what lies at the top, objects and the beginnings of others' names. Nothing below is looked into. What a bucket's
    /// console makes to show a folder is an object without a name, and not listed.
    pub fn top(&self) -> Result<Vec<String>> {
        let listed = self.wait(self.inner.list_with_delimiter(None))?;
        let listed = listed.map_err(failed("list", &Name::default()))?;
        let objects = listed.objects.into_iter().map(|object| object.location);
        let names = listed.common_prefixes.into_iter().chain(objects).map(|name| name.to_string());
        Ok(names.filter(|name| !name.is_empty()).collect())
    }

    /// Removes objects; one that is gone already is not an error.
    pub fn remove(&self, names: &[String]) -> Result<()> {
        for name in names {
            self.check(name, false)?;
            let name = Name::from(name.as_str());
            match self.runtime.block_on(self.in_time(self.inner.delete(&name)))? {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(failed("remove", &name)(error)),
            }
        }
        Ok(())
    }

    /// Makes removals below a prefix durable, before something that relies on them.
    pub fn sync_removals(&self, prefix: &str) -> Result<()> {
        match self.dir().map(|dir| dir.join(prefix)) {
            Some(dir) if dir.is_dir() => Ok(durable::sync_dir(&dir)?),
            _ => Ok(()),
        }
    }
}

/// Whether the environment has keys, or names who gives a pod those of its role.
fn has_credentials(s3: &AmazonS3Builder) -> bool {
    let is_set = |key: &Key| s3.get_config_value(key).is_some_and(|value| !value.is_empty());
    let ways: [&[Key]; 4] = [
        &[Key::AccessKeyId, Key::SecretAccessKey],
        &[Key::WebIdentityTokenFile, Key::RoleArn],
        &[Key::ContainerCredentialsRelativeUri],
        &[Key::ContainerCredentialsFullUri, Key::ContainerAuthorizationTokenFile],
    ];
    ways.iter().any(|keys| keys.iter().all(is_set))
}

/// Whether a cloud's metadata service may be asked. Where there is no such service the address may be anybody's, or never
/// answer.
fn may_ask_the_machine() -> bool {
    std::env::var("AWS_EC2_METADATA_DISABLED").is_ok_and(|value| value.eq_ignore_ascii_case("false"))
}

fn failed(operation: &'static str, name: &Name) -> impl Fn(object_store::Error) -> Error {
    move |source| Error::Store { operation, name: name.clone(), source }
}

#[cfg(test)]
mod tests {
    use files::ALIGN;

    use super::*;

    /// Packs of the same content have one name, and threads may write them at once.
    #[test]
    fn large_objects_are_whole_and_leave_nothing_else() {
        let runtime = crate::repository::tests::runtime();
        let dir = tempfile::tempdir().expect("temp dir");
        let store = Store::open(&dir.path().to_string_lossy(), true, runtime.handle(), &Stop::default())
            .expect("open");
        let content: Vec<u8> = (0..3 * LARGE + 77).map(|byte| (byte % 251) as u8).collect();
        let bytes = Bytes::from(content.clone());
        // Aligned or not, the parts follow each other.
        for cut in [0, 1, ALIGN, content.len() - 1] {
            let puts: Vec<_> = (0..8)
                .map(|_| {
                    let (store, parts) = (store.clone(), vec![bytes.slice(..cut), bytes.slice(cut..)]);
                    runtime.spawn(async move { store.put("packs/ab/same", parts).await })
                })
                .collect();
            for put in puts {
                runtime.block_on(put).expect("a task").expect("put");
            }
            assert_eq!(store.get("packs/ab/same", content.len()).expect("get"), content, "cut at {cut}");
        }
        let files = std::fs::read_dir(dir.path().join("packs/ab")).expect("list").count();
        assert_eq!(files, 1, "drafts were left");
    }
}
