//! What the cases of Kubernetes ask: the service in front of a driver, about two snapshots of one volume, in the names of
//! accounts with different rights.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::answers::Checked;
use proto::kubernetes::snapshot_metadata_client::SnapshotMetadataClient;
use proto::kubernetes::{
    GetMetadataAllocatedRequest, GetMetadataAllocatedResponse, GetMetadataDeltaRequest,
    GetMetadataDeltaResponse,
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Status, Streaming};

use super::super::answer::{Answer, Messages, name};
use super::super::plugin::within;
use super::super::ranges::Ranges;
use super::super::subject::Subject;
use super::super::subject::{Kind, Prepared};
use super::super::verdict::{Judged, Verdict, Wrong};
use super::api::{Account, Api, SNAPSHOTS};
use super::found::{Found, Snapshot};
use super::front::Front;
use crate::conformance::run_name;
use crate::tls;
use csi_client::{Message, Options, Question};

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);
/// What a stream may send ahead, in bytes, and all streams together: h2 closes a connection on which too many small messages
/// wait, and allows more the larger its own window is.
const AHEAD: u32 = 32 << 10;
const ALL_AHEAD: u32 = 16 << 20;
/// What a stream may send ahead of a reader that pauses.
const NARROW: u32 = 512;
/// How long rights may take to be known to the API server.
const RIGHTS: Duration = Duration::from_secs(30);
/// A VolumeSnapshot of the suite's own that is never ready.
pub(super) const UNREADY: &str = "unready";
/// A VolumeSnapshot that some account may get, and that does not exist.
pub(super) const ANOTHER: &str = "another-snapshot";

/// An account of the suite, and what it may do with VolumeSnapshots.
pub(super) struct Role {
    pub name: &'static str,
    verbs: &'static [&'static str],
    /// In the namespace of the snapshots; else in the suite's own.
    here: bool,
    /// The VolumeSnapshots; empty: all.
    names: fn(&Cluster) -> Vec<&str>,
}

const GET: &[&str] = &["get"];
/// May get all VolumeSnapshots, in the namespace of the snapshots and in the suite's own.
pub(super) const READER: &str = "reader";
/// May do nothing.
pub(super) const NOBODY: &str = "nobody";
/// May list and watch, and not get.
pub(super) const LISTER: &str = "lister";
/// May get the two snapshots, by their names.
pub(super) const NAMED: &str = "named";
/// May get the target, by its name.
pub(super) const TARGET_ONLY: &str = "target-only";
/// May get another VolumeSnapshot of the same namespace, by its name.
pub(super) const ELSE: &str = "other-name";
/// May get all in the suite's namespace alone.
pub(super) const STRANGER: &str = "stranger";
const ACCOUNTS: [&str; 7] = [READER, NOBODY, LISTER, NAMED, TARGET_ONLY, ELSE, STRANGER];

const ROLES: &[Role] = &[
    Role { name: READER, verbs: GET, here: true, names: |_| Vec::new() },
    Role { name: READER, verbs: GET, here: false, names: |_| Vec::new() },
    Role { name: LISTER, verbs: &["list", "watch"], here: true, names: |_| Vec::new() },
    Role { name: NAMED, verbs: GET, here: true, names: |all| vec![&all.base.name, &all.target.name] },
    Role { name: TARGET_ONLY, verbs: GET, here: true, names: |all| vec![&all.target.name] },
    Role { name: ELSE, verbs: GET, here: true, names: |_| vec![ANOTHER] },
    Role { name: STRANGER, verbs: GET, here: false, names: |_| Vec::new() },
];

/// The service, and its callers.
pub(super) struct Cluster {
    pub api: Api,
    /// Of the snapshots.
    pub namespace: String,
    /// The suite's own, with its accounts.
    pub home: String,
    pub base: Snapshot,
    pub target: Snapshot,
    pub front: Front,
    /// A token that has expired.
    pub expired: Option<String>,
    /// Of each account, for the service.
    tokens: BTreeMap<&'static str, String>,
    channel: Result<Channel, Wrong>,
    /// What was answered at first, to each [`Kind`].
    first: Vec<Result<Answer, Wrong>>,
}

/// Whose name a call is made in, and which namespace it names.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub token: String,
    pub namespace: String,
}

impl Cluster {
    pub fn new(api: Api, namespace: String, found: Found, expired: Option<String>) -> Self {
        let Found { base, target, front } = found;
        let channel = channel(&front, AHEAD);
        let (home, tokens, first) = (String::new(), BTreeMap::new(), Vec::new());
        Cluster { api, namespace, home, base, target, front, expired, tokens, channel, first }
    }

    /// Makes the accounts, and waits until the API server knows their rights.
    pub async fn make(&mut self) -> Result<(), String> {
        self.home = run_name("cbt-lab-conformance")?;
        let (api, home) = (&self.api, self.home.as_str());
        let labels = json!({"app.kubernetes.io/managed-by": "cbt-lab", "cbt-lab/tests": self.namespace});
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"labels": labels}});
        api.make("/api/v1/namespaces", home, namespace).await?;
        let accounts = format!("/api/v1/namespaces/{home}/serviceaccounts");
        for name in ACCOUNTS {
            let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {}});
            api.make(&accounts, name, account).await?;
        }
        for role in ROLES {
            let place = if role.here { &self.namespace } else { &self.home };
            let names = (role.names)(self);
            let mut rule = json!({
                "apiGroups": ["snapshot.storage.k8s.io"], "resources": ["volumesnapshots"], "verbs": role.verbs,
            });
            if !names.is_empty() {
                rule["resourceNames"] = json!(names);
            }
            let account = Account { namespace: home, name: role.name };
            api.allow(place, &format!("{home}-{}", role.name), rule, &account).await?;
        }
        self.make_unready(UNREADY, json!({"readyToUse": false})).await?;
        self.until_rights_are_known().await?;
        // The object may have none, which is a case.
        let audience = self.front.audience.as_deref();
        let mut tokens = BTreeMap::new();
        for name in ACCOUNTS {
            tokens.insert(name, api.token(&Account { namespace: home, name }, audience, None).await?);
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Asks for the first time.
    pub async fn look(&mut self, patience: Duration) {
        let mut first = Vec::new();
        for kind in [Kind::Allocated, Kind::Delta] {
            let question = self.questions(kind);
            first.push(within(patience, self.ask(&question, 0, 0)).await.flatten());
        }
        self.first = first;
    }

    /// A VolumeSnapshot in the suite's own namespace of a claim that does not exist.
    pub async fn make_unready(&self, name: &str, status: Value) -> Result<(), String> {
        let path = format!("{SNAPSHOTS}/namespaces/{}/volumesnapshots", self.home);
        let snapshot = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {},
            "spec": {"source": {"persistentVolumeClaimName": "no-such-claim"}},
        });
        self.api.make(&path, name, snapshot).await?;
        if !status.is_null() {
            self.api.patch(&format!("{path}/{name}/status"), json!({"status": status})).await?;
        }
        Ok(())
    }

    async fn until_rights_are_known(&self) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + RIGHTS;
        for role in ROLES {
            let account = Account { namespace: &self.home, name: role.name };
            let place = if role.here { &self.namespace } else { &self.home };
            let name = (role.names)(self).first().copied().unwrap_or_default();
            while !self.api.may(&account, place, role.verbs[0], name).await? {
                if tokio::time::Instant::now() > deadline {
                    return Err(format!(
                        "the rights of {} are not known after {} s",
                        role.name,
                        RIGHTS.as_secs()
                    ));
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    /// An account of the suite, asking in the namespace of the snapshots.
    pub fn caller(&self, name: &str) -> Caller {
        let token = self.tokens.get(name).cloned().unwrap_or_default();
        Caller { token, namespace: self.namespace.clone() }
    }

    pub fn account<'a>(&'a self, name: &'a str) -> Account<'a> {
        Account { namespace: &self.home, name }
    }

    /// The question about both snapshots, or the target.
    pub fn questions(&self, kind: Kind) -> Question {
        match kind {
            Kind::Allocated => Question::Allocated { snapshot: self.target.name.clone() },
            Kind::Delta => {
                Question::Delta { base: self.base.handle.clone(), target: self.target.name.clone() }
            }
        }
    }

    pub fn first(&self, kind: Kind) -> Result<&Answer, Wrong> {
        let first = self.first.get(kind as usize).ok_or_else(|| Wrong::new("nothing was asked yet"))?;
        first.as_ref().map_err(|wrong| wrong.clone().at("when it was first asked"))
    }

    /// An answer to somebody, however it ends.
    pub async fn ask_as(
        &self,
        caller: &Caller,
        question: &Question,
        options: &Options,
    ) -> Result<Answer, Wrong> {
        let channel = self.channel.clone()?;
        let mut asking =
            Asking { client: SnapshotMetadataClient::new(Checked(channel)), caller: caller.clone() };
        Self::read(&mut asking, question, options).await
    }
}

/// A connection that is made when it is first used, and again when it was lost; with that window.
fn channel(front: &Front, window: u32) -> Result<Channel, Wrong> {
    let (host, port) = front.place()?;
    let (name, config) = (front.server_name()?, front.config()?);
    let wrong = |error: &dyn std::fmt::Display| Wrong::new(format!("address {}: {error}", front.address));
    let bracketed = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    let endpoint =
        Endpoint::from_shared(format!("http://{bracketed}:{port}")).map_err(|error| wrong(&error))?;
    let origin: Uri = format!("https://{bracketed}:{port}").parse().map_err(|error| wrong(&error))?;
    let endpoint = endpoint.origin(origin).connect_timeout(CONNECT);
    let endpoint = endpoint.initial_stream_window_size(window).initial_connection_window_size(ALL_AHEAD);
    Ok(tls::channel(&endpoint, config, name, (host, port)))
}

/// A connection, and whose name calls on it are made in.
pub(super) struct Asking {
    client: SnapshotMetadataClient<Checked>,
    caller: Caller,
}

/// An answer under way.
pub(super) enum Stream {
    Allocated(Streaming<GetMetadataAllocatedResponse>),
    Delta(Streaming<GetMetadataDeltaResponse>),
}

impl Messages for Stream {
    async fn next(&mut self) -> Result<Option<Message>, Status> {
        let message = match self {
            Stream::Allocated(stream) => stream
                .message()
                .await?
                .map(|it| (it.block_metadata_type, it.volume_capacity_bytes, it.block_metadata)),
            Stream::Delta(stream) => stream
                .message()
                .await?
                .map(|it| (it.block_metadata_type, it.volume_capacity_bytes, it.block_metadata)),
        };
        Ok(message.map(|(style, capacity, tuples)| Message {
            style,
            capacity,
            tuples: tuples.iter().map(|tuple| (tuple.byte_offset, tuple.size_bytes)).collect(),
        }))
    }
}

fn timed<M>(message: M, options: &Options) -> Request<M> {
    let mut request = Request::new(message);
    if let Some(millis) = options.timeout_ms {
        request.set_timeout(Duration::from_millis(millis));
    }
    request
}

impl Subject for Cluster {
    type Need = ();
    type Narrow = Asking;
    type Stream = Stream;

    const MUST: &'static str = "that the first answer has";
    const SPREAD: &'static str =
        "name two snapshots with changes at several places between them (--snapshot)";
    /// Snapshots of the user's may have any number of changes.
    const RESUMES: usize = 40;
    const KNOWS_FIRST: bool = true;
    const MORE: &'static str = "name two snapshots with more changes between them (--snapshot)";

    fn made_from((): ()) -> &'static [()] {
        &[]
    }

    async fn prepare(&self, (): ()) -> Prepared<()> {
        Ok(())
    }

    /// Services have few calls to the API server in a second, and one case ends the community's sidecar.
    fn exclude(_: &[()], _: &[()]) -> bool {
        true
    }

    async fn is_silent(&self) -> bool {
        let Ok(place) = self.front.place() else { return false };
        !matches!(tokio::time::timeout(CONNECT, TcpStream::connect(place)).await, Ok(Ok(_)))
    }

    async fn clean_up(&self, patience: Duration) -> Vec<String> {
        self.api.delete_all(patience).await
    }

    fn made(&self) -> Vec<String> {
        self.api.made()
    }

    fn question(&self, kind: Kind) -> Result<Question, Wrong> {
        Ok(self.questions(kind))
    }

    fn must(&self, kind: Kind) -> Result<Ranges, Wrong> {
        Ok(self.first(kind)?.ranges())
    }

    fn dense_question(&self, kind: Kind) -> Result<(Question, Ranges), Wrong> {
        Ok((self.questions(kind), self.must(kind)?))
    }

    fn size(&self) -> Result<u64, Wrong> {
        let capacity =
            self.first(Kind::Allocated)?.capacity().and_then(|capacity| u64::try_from(capacity).ok());
        capacity
            .filter(|capacity| *capacity > 0)
            .ok_or_else(|| Wrong::new("the first answer tells no capacity"))
    }

    fn end(&self) -> Result<i64, Wrong> {
        Ok(self.size()? as i64)
    }

    fn reversed(&self) -> Result<Vec<Question>, Wrong> {
        Ok(vec![Question::Delta { base: self.target.handle.clone(), target: self.base.name.clone() }])
    }

    fn same(&self) -> Result<Question, Wrong> {
        Ok(Question::Delta { base: self.target.handle.clone(), target: self.target.name.clone() })
    }

    fn without_tuples(&self) -> Judged {
        Ok(Verdict::NotShown(format!(
            "there is no tuple to look at: {} and {} do not differ; {}",
            self.base.name,
            self.target.name,
            Self::SPREAD
        )))
    }

    fn options(&self, offset: i64, max_results: i32) -> Options {
        Options { offset, max_results, ..Options::default() }
    }

    async fn try_ask(&self, question: &Question, options: &Options) -> Result<Answer, Wrong> {
        self.ask_as(&self.caller(READER), question, options).await
    }

    async fn narrow(&self) -> Result<Asking, Wrong> {
        let channel = channel(&self.front, NARROW)?;
        Ok(Asking { client: SnapshotMetadataClient::new(Checked(channel)), caller: self.caller(READER) })
    }

    async fn open(asking: &mut Asking, question: &Question, options: &Options) -> Result<Stream, Status> {
        let Caller { token: security_token, namespace } = asking.caller.clone();
        let Options { offset: starting_offset, max_results, .. } = *options;
        Ok(match question.clone() {
            Question::Allocated { snapshot: snapshot_name } => {
                let request = GetMetadataAllocatedRequest {
                    security_token,
                    namespace,
                    snapshot_name,
                    starting_offset,
                    max_results,
                };
                Stream::Allocated(
                    asking.client.get_metadata_allocated(timed(request, options)).await?.into_inner(),
                )
            }
            Question::Delta { base: base_snapshot_id, target: target_snapshot_name } => {
                let request = GetMetadataDeltaRequest {
                    security_token,
                    namespace,
                    base_snapshot_id,
                    target_snapshot_name,
                    starting_offset,
                    max_results,
                };
                Stream::Delta(asking.client.get_metadata_delta(timed(request, options)).await?.into_inner())
            }
        })
    }
}

/// A question as a person would write it.
pub(super) fn named(question: &Question) -> String {
    name(question, &Options::default())
}
