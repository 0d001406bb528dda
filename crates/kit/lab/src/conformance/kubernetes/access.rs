//! Tokens, rights, namespaces, names: who is answered, and with which code a call is refused.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use snapshot_metadata_client::{Client, Options as Access, Policy, Token};
use tonic::Code;

use super::super::answer::{Answer, missing};
use super::super::errors::NO_IDS;
use super::super::subject::Kind;
use super::super::subject::Subject;
use super::super::verdict::{Judged, Verdict, Wrong, code_name, remarked, remarked_once, said};
use super::cluster::{
    ANOTHER, Caller, Cluster, ELSE, LISTER, NAMED, NOBODY, READER, STRANGER, TARGET_ONLY, UNREADY, named,
};
use csi_client::{Options, Question};

const KINDS: [Kind; 2] = [Kind::Allocated, Kind::Delta];

/// An answer has to be a refusal with `code`. Codes that a client can live with are remarked.
fn refusal(
    what: &str,
    question: &Question,
    answer: &Answer,
    code: Code,
    also: &[Code],
) -> Result<Option<String>, Wrong> {
    let call = format!("{what}: {}", named(question));
    let wanted = code_name(code);
    match &answer.end {
        Ok(()) => {
            let tuples = answer.tuples().count();
            Err(Wrong::new(format!("{call}: OK with {tuples} tuples, not {wanted}")))
        }
        // An error of the connection is not a refusal.
        Err(status) if std::error::Error::source(status).is_some() => Err(Wrong::call(&call, status)),
        Err(_) if !answer.messages.is_empty() => {
            Err(Wrong::new(format!("{call}: {} messages before it was refused", answer.messages.len())))
        }
        Err(status) if status.code() == code => Ok(None),
        Err(status) if also.contains(&status.code()) => {
            Ok(Some(format!("{what}: {}, where {wanted} is the plain answer", said(status))))
        }
        Err(status) => Err(Wrong::new(format!("{call}: {}, not {wanted}", said(status)))),
    }
}

/// Both calls by each of these have to be refused.
async fn refused(cluster: &Cluster, callers: &[(&str, Caller)], code: Code, also: &[Code]) -> Judged {
    let mut remarks = Vec::new();
    for (what, caller) in callers {
        for kind in KINDS {
            let question = cluster.questions(kind);
            let answer = cluster.ask_as(caller, &question, &Options::default()).await?;
            remarks.extend(refusal(what, &question, &answer, code, also)?);
        }
    }
    remarked_once(remarks)
}

/// The same of an account.
async fn forbidden(cluster: &Cluster, what: &str, account: &str) -> Judged {
    refused(cluster, &[(what, cluster.caller(account))], Code::PermissionDenied, &[Code::Unauthenticated])
        .await
}

/// With other tokens, all of which have to be refused as those of no user.
async fn unknown(cluster: &Cluster, tokens: Vec<(&str, String)>) -> Judged {
    let namespace = &cluster.namespace;
    let caller = |(what, token)| (what, Caller { token, namespace: namespace.clone() });
    let callers: Vec<_> = tokens.into_iter().map(caller).collect();
    refused(cluster, &callers, Code::Unauthenticated, &[]).await
}

pub(super) async fn no_token(cluster: &Cluster) -> Judged {
    let caller = Caller { token: String::new(), namespace: cluster.namespace.clone() };
    refused(cluster, &[("no token", caller)], Code::InvalidArgument, &[Code::Unauthenticated]).await
}

pub(super) async fn garbage(cluster: &Cluster) -> Judged {
    // Behind "Bearer " in a header, what begins with a blank is not a token: a service that passes it on hears of a user who has none.
    let texts = [
        ("garbage", "garbage"),
        ("a.b.c", "a.b.c"),
        ("..", ".."),
        ("a user's name", "system:serviceaccount:kube-system:default"),
        ("two lines", "token\r\nwith: a line"),
        ("a blank", " "),
        ("a line break", "\n"),
        ("a blank and a text", " x"),
        ("a tab and a text", "\tx"),
        ("another scheme of HTTP", " Basic YWJj"),
        ("two words", "a b"),
    ];
    unknown(cluster, texts.iter().map(|(what, text)| (*what, (*text).to_owned())).collect()).await
}

/// A good token whose signature is no longer that of its claims.
pub(super) async fn forged(cluster: &Cluster) -> Judged {
    let good = cluster.caller(READER).token;
    let [header, claims, signature] = good.split('.').collect::<Vec<_>>()[..] else {
        return Ok(Verdict::Skip("the API server's tokens are not JWTs".into()));
    };
    let decoded =
        URL_SAFE_NO_PAD.decode(claims).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    let Some(mut other) = decoded else {
        return Ok(Verdict::Skip("the API server's tokens have no claims to read".into()));
    };
    let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let unsigned = format!("{}.{claims}.", encode(&json!({"alg": "none", "typ": "JWT"})));
    other["jti"] = json!("00000000-0000-0000-0000-000000000000");
    let changed = format!("{header}.{}.{signature}", encode(&other));
    // In the middle, for the last character may hold bits that count for nothing.
    let middle = signature.len() / 2;
    let flipped = if signature.as_bytes().get(middle) == Some(&b'A') { 'B' } else { 'A' };
    let mut spoiled: Vec<char> = signature.chars().collect();
    if let Some(place) = spoiled.get_mut(middle) {
        *place = flipped;
    }
    let spoiled = format!("{header}.{claims}.{}", spoiled.into_iter().collect::<String>());
    let tokens = vec![
        ("a token without a signature", unsigned),
        ("a token with other claims", changed),
        ("a token with another signature", spoiled),
    ];
    unknown(cluster, tokens).await
}

/// Tokens of an account that has all rights, for somebody else.
pub(super) async fn audience(cluster: &Cluster) -> Judged {
    let account = cluster.account(READER);
    let for_other = cluster.api.token(&account, Some("another-audience.cbt-lab"), None).await;
    let for_api = cluster.api.token(&account, None, None).await;
    let made =
        |token: Result<String, super::api::Refusal>| token.map_err(|refusal| Wrong::new(refusal.to_string()));
    let tokens = vec![
        ("a token for another audience", made(for_other)?),
        ("a token for the API server", made(for_api)?),
    ];
    unknown(cluster, tokens).await
}

/// A token that is bound to a Secret, which is deleted.
pub(super) async fn revoked(cluster: &Cluster) -> Judged {
    let wrong = |refusal: super::api::Refusal| Wrong::new(refusal.to_string());
    let Some(audience) = &cluster.front.audience else {
        return Err(Wrong::new("spec.audience is missing"));
    };
    let (path, name) = (format!("/api/v1/namespaces/{}/secrets", cluster.home), "revoked");
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {}});
    let made = cluster.api.make(&path, name, secret).await.map_err(wrong)?;
    let uid = made.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    let token = cluster
        .api
        .token(&cluster.account(READER), Some(audience), Some((name, uid)))
        .await
        .map_err(wrong)?;
    cluster.api.delete(&format!("{path}/{name}")).await.map_err(wrong)?;
    while cluster.api.knows(&token, audience).await.map_err(wrong)? {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    unknown(cluster, vec![("a token that was revoked", token)]).await
}

pub(super) async fn expired(cluster: &Cluster) -> Judged {
    match &cluster.expired {
        Some(token) => unknown(cluster, vec![("a token that has expired", token.clone())]).await,
        None => Ok(Verdict::Skip(
            "no token can be made that expires within ten minutes: name a file with an older one (--expired-token)".into(),
        )),
    }
}

pub(super) async fn no_rights(cluster: &Cluster) -> Judged {
    forbidden(cluster, "an account without rights", NOBODY).await
}

pub(super) async fn list_only(cluster: &Cluster) -> Judged {
    forbidden(cluster, "an account that may list and watch", LISTER).await
}

pub(super) async fn other_name(cluster: &Cluster) -> Judged {
    forbidden(cluster, &format!("an account that may get {ANOTHER} alone"), ELSE).await
}

pub(super) async fn other_namespace(cluster: &Cluster) -> Judged {
    forbidden(cluster, "an account with rights in another namespace", STRANGER).await
}

/// A role that names both snapshots gives the right to get them.
pub(super) async fn by_name(cluster: &Cluster) -> Judged {
    for kind in KINDS {
        let (question, options) = (cluster.questions(kind), Options::default());
        let answer = cluster.ask_as(&cluster.caller(NAMED), &question, &options).await?;
        let answer = answer.ok(&question, &options);
        answer.map_err(|wrong| wrong.at("an account that may get both snapshots by their names"))?;
    }
    Ok(Verdict::Pass)
}

/// The contract lets a service pass the base on as it is.
pub(super) async fn base(cluster: &Cluster) -> Judged {
    let (caller, options) = (cluster.caller(TARGET_ONLY), Options::default());
    let target = cluster.ask_as(&caller, &cluster.questions(Kind::Allocated), &options).await?;
    if target.end.is_err() {
        return Ok(Verdict::Skip(
            "an account that may get one VolumeSnapshot by its name is refused altogether".into(),
        ));
    }
    let question = cluster.questions(Kind::Delta);
    let answer = cluster.ask_as(&caller, &question, &options).await?;
    match &answer.end {
        Ok(()) => Ok(Verdict::Allowed(
            "the base is not checked: a user who knows its handle may use it without a right to its VolumeSnapshot".into(),
        )),
        Err(_) => {
            let what = "an account that may get the target alone";
            remarked(refusal(what, &question, &answer, Code::PermissionDenied, &[])?.into_iter().collect())
        }
    }
}

/// An answer to the account with all rights has to be a refusal.
async fn refused_to_reader(
    cluster: &Cluster,
    namespace: &str,
    questions: &[(&str, Question)],
    code: Code,
    also: &[Code],
) -> Judged {
    let caller = Caller { namespace: namespace.to_owned(), ..cluster.caller(READER) };
    let mut remarks = Vec::new();
    for (what, question) in questions {
        let answer = cluster.ask_as(&caller, question, &Options::default()).await?;
        remarks.extend(refusal(what, question, &answer, code, also)?);
    }
    remarked_once(remarks)
}

/// Both questions about a snapshot of that name, and what it is.
fn about<'w>(cluster: &Cluster, snapshot: &str, what: &'w str) -> [(&'w str, Question); 2] {
    [
        (what, Question::Allocated { snapshot: snapshot.to_owned() }),
        (what, Question::Delta { base: cluster.base.handle.clone(), target: snapshot.to_owned() }),
    ]
}

pub(super) async fn unknown_snapshot(cluster: &Cluster) -> Judged {
    let questions = about(cluster, "no-such-snapshot", "a VolumeSnapshot that does not exist");
    refused_to_reader(cluster, &cluster.namespace, &questions, Code::NotFound, &[Code::Unavailable]).await
}

/// The target's name, in a namespace that has no such snapshot and in which the caller has rights.
pub(super) async fn elsewhere(cluster: &Cluster) -> Judged {
    let questions = about(cluster, &cluster.target.name, "a VolumeSnapshot of another namespace");
    refused_to_reader(cluster, &cluster.home, &questions, Code::NotFound, &[Code::Unavailable]).await
}

const NOT_YET: [Code; 2] = [Code::FailedPrecondition, Code::NotFound];

pub(super) async fn unready(cluster: &Cluster) -> Judged {
    let questions = about(cluster, UNREADY, "a VolumeSnapshot that is not ready");
    refused_to_reader(cluster, &cluster.home, &questions, Code::Unavailable, &NOT_YET).await
}

/// A VolumeSnapshot that no controller has looked at yet has no status at all.
pub(super) async fn new_snapshot(cluster: &Cluster) -> Judged {
    let name = "new";
    cluster.make_unready(name, Value::Null).await.map_err(Wrong::new)?;
    let questions = about(cluster, name, "a VolumeSnapshot that was just made");
    refused_to_reader(cluster, &cluster.home, &questions, Code::Unavailable, &NOT_YET).await
}

pub(super) async fn missing_arguments(cluster: &Cluster) -> Judged {
    let target = &cluster.target.name;
    let delta =
        |base: &str, target: &str| Question::Delta { base: base.to_owned(), target: target.to_owned() };
    let questions = [
        ("no snapshot_name", Question::Allocated { snapshot: String::new() }),
        ("no target_snapshot_name", delta(&cluster.base.handle, "")),
        ("no base_snapshot_id", delta("", target)),
    ];
    let judged =
        refused_to_reader(cluster, &cluster.namespace, &questions, Code::InvalidArgument, &[]).await?;
    let questions = KINDS.map(|kind| ("no namespace", cluster.questions(kind)));
    refused_to_reader(cluster, "", &questions, Code::InvalidArgument, &[]).await?;
    Ok(judged)
}

/// Names that no object has: whatever they are refused with, they must not lead anywhere else.
pub(super) async fn no_names(cluster: &Cluster) -> Judged {
    let long = "a".repeat(300);
    let target = &cluster.target.name;
    let path = format!("../{}/{target}", cluster.namespace);
    let also = [Code::NotFound, Code::Unavailable, Code::PermissionDenied];
    let mut judged = Verdict::Pass;
    for name in
        ["..", "a/b", "A B", "%2e%2e", &format!("{target}/status"), &format!("{target}?x=y"), &long, &path]
    {
        let questions = about(cluster, name, "a name of no object");
        judged =
            refused_to_reader(cluster, &cluster.namespace, &questions, Code::InvalidArgument, &also).await?;
    }
    let namespace = format!("{}/volumesnapshots/x/../..", cluster.namespace);
    let questions = KINDS.map(|kind| ("a name of no namespace", cluster.questions(kind)));
    refused_to_reader(cluster, &namespace, &questions, Code::InvalidArgument, &also).await?;
    Ok(match judged {
        Verdict::Allowed(_) => {
            Verdict::Allowed("they are refused as names of objects that do not exist".into())
        }
        other => other,
    })
}

pub(super) async fn unknown_base(cluster: &Cluster) -> Judged {
    let question =
        |base: &str| Question::Delta { base: base.to_owned(), target: cluster.target.name.clone() };
    let questions = NO_IDS.map(|base| ("a base of no snapshot", question(base)));
    refused_to_reader(cluster, &cluster.namespace, &questions, Code::NotFound, &[Code::InvalidArgument]).await
}

/// As a backup tool does it: from the objects to the service, with a token that it asks for itself.
pub(super) async fn client(cluster: &Cluster) -> Judged {
    let account = cluster.account(READER);
    let token =
        Token::ServiceAccount { namespace: account.namespace.to_owned(), name: account.name.to_owned() };
    let access = Access { token, ..Access::default() };
    let policy = Policy { retries: 0, ..Policy::default() };
    let client =
        Client::kubernetes(cluster.api.client.clone(), &cluster.namespace, access).with_policy(policy);
    let read = async {
        let handle = client.snapshot_handle(&cluster.base.name).await?;
        client.delta(&handle, &cluster.target.name).await?.collect_all().await
    };
    let ranges = read.await.map_err(|error| Wrong::new(base::report(&error)))?;
    let listed = super::super::ranges::Ranges::of(
        ranges.iter().map(|range| range.offset..range.offset + range.length),
    );
    missing(Cluster::MUST, &cluster.must(Kind::Delta)?, &listed)?;
    Ok(Verdict::Pass)
}

/// The service answers as it did at first.
pub(super) async fn alive(cluster: &Cluster) -> Judged {
    for kind in KINDS {
        let answer = cluster.ask(&cluster.questions(kind), 0, 0).await?;
        missing(Cluster::MUST, &cluster.must(kind)?, &answer.ranges())?;
    }
    Ok(Verdict::Pass)
}
