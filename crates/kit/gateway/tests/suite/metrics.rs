//! Promise: /metrics says what was done, by the names and labels of docs/reference.md alone, and no label is a client's word.

use std::collections::{BTreeMap, BTreeSet};

use tonic::Code;

use crate::certificates;
use crate::driver::{Driver, MESSAGES, TUPLES};
use crate::world::{AUDIENCE, Answer, Client, World, about, code};

const ALLOCATED: &str = "GetMetadataAllocated";
const DELTA: &str = "GetMetadataDelta";

pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// The samples of a scrape. No label value in it holds a comma, a quote or a brace.
pub fn samples(text: &str) -> Vec<Sample> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let sample = |line: &str| -> Option<Sample> {
        let (series, value) = line.rsplit_once(' ')?;
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.strip_suffix('}')?.split(',').filter(|label| !label.is_empty());
        let label = |label: &str| {
            let (label, value) = label.split_once("=\"")?;
            Some((label.to_owned(), value.strip_suffix('"')?.to_owned()))
        };
        let labels = labels.map(label).collect::<Option<_>>()?;
        Some(Sample { name: name.to_owned(), labels, value: value.parse().ok()? })
    };
    lines.map(|line| sample(line).unwrap_or_else(|| panic!("{line:?}"))).collect()
}

/// The sum of the samples of a name with these labels among theirs.
pub fn sum(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let has = |sample: &&Sample| {
        sample.name == name
            && labels.iter().all(|(label, value)| sample.labels.get(*label).is_some_and(|is| is == value))
    };
    samples.iter().filter(has).map(|sample| sample.value).sum()
}

fn values(label: &str) -> Vec<String> {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    match label {
        "method" => texts(&[ALLOCATED, DELTA]),
        "code" => (0..17).map(|code| format!("{:?}", Code::from_i32(code))).collect(),
        "review" => texts(&["TokenReview", "SubjectAccessReview"]),
        "outcome" => texts(&["allowed", "denied", "failed", "cached"]),
        "call" => texts(&["TokenReview", "SubjectAccessReview", "VolumeSnapshot", "Secret"]),
        "output" => texts(&["stdout", "stderr"]),
        "objects" => texts(&["volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses"]),
        _ => panic!("a label {label}"),
    }
}

pub async fn metrics_are_those_of_the_reference_and_fit_the_calls(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let (ns, other) = (world.namespace.clone(), world.other_namespace().await);
    for (name, handle) in
        [("first", "plain-1"), ("second", "plain-2"), ("lost", "unknown-1"), ("long", "paced-1")]
    {
        world.snapshot(&ns, name, handle).await;
    }
    world.snapshot(&other, "theirs", "plain-3").await;
    certificates::empty_secret(&world).await;
    let token = world.reader("reader").await;
    let wrong = world.api.token(&ns, "reader", "another-audience").await;
    let config = world.gateway_kubeconfig("gateway").await;
    // One that manages certificates has every metric that there is.
    let gateway = certificates::start(&world, "one", &config, ["3650d", "90d", "1h"]);
    gateway.ready().await;
    let ca = certificates::bundle(&certificates::service(&world).await.expect("the object"));
    let mut client = Client::connect(gateway.port, "127.0.0.1", &ca).await.expect("connect");

    // Calls of every kind, with what came of them, and whether a token and a right were looked at.
    let mut calls: BTreeMap<(&str, String), f64> = BTreeMap::new();
    let mut ended = |method: &'static str, answer: &Answer, expected: Code| {
        assert_eq!(code(answer), expected, "{answer:?}");
        *calls.entry((method, format!("{expected:?}"))).or_default() += 1.0;
    };
    for _ in 0..5 {
        ended(ALLOCATED, &client.allocated(&token, &ns, "second").await, Code::Ok);
    }
    for _ in 0..2 {
        ended(DELTA, &client.delta(&token, &ns, "deleted", "second").await, Code::Ok);
    }
    ended(ALLOCATED, &client.allocated(&token, &ns, "lost").await, Code::NotFound);
    ended(DELTA, &client.delta(&token, &ns, "forgotten", "second").await, Code::NotFound);
    ended(ALLOCATED, &client.allocated(&wrong, &ns, "second").await, Code::Unauthenticated);
    ended(ALLOCATED, &client.allocated(&token, &other, "theirs").await, Code::PermissionDenied);
    ended(DELTA, &client.delta("", &ns, "deleted", "second").await, Code::InvalidArgument);
    // A name that a client makes up is no label.
    for number in 0..20 {
        let name = format!("made-up-{number}");
        ended(ALLOCATED, &client.allocated(&token, &ns, &name).await, Code::NotFound);
        ended(ALLOCATED, &client.allocated(&token, &name, "second").await, Code::PermissionDenied);
    }
    let request = about(&token, &ns, "long");
    let mut stream = client.0.get_metadata_allocated(request).await.expect("a stream").into_inner();
    assert!(stream.message().await.expect("a message").is_some());

    let (status, text) = gateway.get("/metrics").await.expect("metrics");
    assert_eq!(status, 200);
    for hidden in [token.as_str(), &wrong, &ns, &other, "made-up", AUDIENCE] {
        assert!(!text.contains(hidden), "{hidden} is in the metrics:\n{text}");
    }
    let samples = samples(&text);
    // The names of histograms have three endings.
    let histograms: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" histogram")).collect();
    let family = |name: &str| -> String {
        let ends = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        ends.filter(|start| histograms.contains(start)).unwrap_or(name).to_owned()
    };
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for sample in &samples {
        let labels = found.entry(family(&sample.name)).or_default();
        for (label, value) in sample.labels.iter().filter(|(label, _)| *label != "le") {
            assert!(values(label).contains(value), "{}: {label} is {value:?}", sample.name);
            labels.insert(label.clone());
        }
    }
    let mut documented = testkit::pages::metrics();
    documented.retain(|name, _| name.starts_with("deltapath_gateway_"));
    assert_eq!(found, documented, "the scrape, and the reference");
    for name in found.keys() {
        assert!(text.contains(&format!("# HELP {name} ")), "{name} has no help");
    }

    // What was counted is what was done.
    let value =
        |name: &str, labels: &[(&str, &str)]| sum(&samples, &format!("deltapath_gateway_{name}"), labels);
    for method in [ALLOCATED, DELTA] {
        let own = || calls.iter().filter(move |((of, _), _)| *of == method);
        for ((_, code), times) in own() {
            assert_eq!(value("rpc_total", &[("method", method), ("code", code)]), *times, "{method} {code}");
        }
        let (of, all) = ([("method", method)], own().map(|(_, times)| times).sum::<f64>());
        let served = calls[&(method, "Ok".to_owned())];
        assert_eq!(value("rpc_total", &of), all, "{method}");
        assert_eq!(value("rpc_seconds_count", &of), all, "{method}");
        assert_eq!(value("rpc_seconds_bucket", &[of[0], ("le", "+Inf")]), all, "{method}");
        assert!(value("rpc_seconds_sum", &of) > 0.0, "{method}");
        // The open stream has begun, and not ended.
        let begun = served + f64::from(u8::from(method == ALLOCATED));
        assert_eq!(value("first_message_seconds_count", &of), begun, "{method}");
        assert_eq!(value("stream_tuples_total", &of), served * (MESSAGES * TUPLES) as f64, "{method}");
        let lines = gateway.audit().into_iter().filter(|line| line["method"] == method);
        let bytes: u64 = lines.map(|line| line["bytes"].as_u64().expect("bytes")).sum();
        assert_eq!(value("stream_bytes_total", &of), bytes as f64, "{method}");
    }
    assert_eq!(value("open_streams", &[]), 1.0);
    assert_eq!(value("driver_ready", &[]), 1.0);
    for objects in values("objects") {
        assert!(value("watch_answered_seconds", &[("objects", &objects)]) > 1.7e9, "{objects}");
    }
    assert!(value("certificate_not_after_seconds", &[]) > 1.7e9);
    // Every call but the one without a token had its token looked at, and every one with a good token a right.
    let all = calls.values().sum::<f64>() + 1.0;
    for (review, looked_at, denied) in
        [("TokenReview", all - 1.0, 1.0), ("SubjectAccessReview", all - 2.0, 21.0)]
    {
        let of = |outcome| value("reviews_total", &[("review", review), ("outcome", outcome)]);
        assert_eq!(value("reviews_total", &[("review", review)]), looked_at, "{review}");
        assert_eq!((of("denied"), of("failed")), (denied, 0.0), "{review}");
        assert!(of("allowed") >= 1.0 && of("cached") >= 1.0, "{review}:\n{text}");
        assert_eq!(value("api_seconds_count", &[("call", review)]), looked_at - of("cached"), "{review}");
    }

    for (path, expected) in [("/healthz", 200), ("/readyz", 200), ("/", 404)] {
        assert_eq!(gateway.get(path).await.expect(path).0, expected, "{path}");
    }
}
