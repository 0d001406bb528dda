//! How faults are chosen: at the start, over HTTP, and by a request's or a snapshot's own marker.

use std::time::Duration;

use csi_client::{Question, delta_of};
use proto::*;
use serde_json::Value;

use super::life::{CHANGED, bound, make, of_snapshot, snapshot};
use super::{Lab, allocated, code, connect, delta, read};

/// Turned on and off over HTTP, and named by a request's or a snapshot's own marker.
#[tokio::test(flavor = "multi_thread")]
async fn faults_are_chosen_while_it_runs() {
    let dir = tempfile::tempdir().expect("temp dir");
    let file = dir.path().join("faults");
    std::fs::write(&file, "# nothing at first\nrefuse:call=Probe,nth=2,code=INTERNAL\n").expect("write");
    let (lab, socket) = Lab::mock(&dir, &["--faults-file", file.to_str().expect("UTF-8")]).await;
    let mut client = connect(&socket).await;
    let mut probes = Vec::new();
    for _ in 0..3 {
        let probe = client.identity.probe(ProbeRequest {}).await;
        probes.push(probe.map_or_else(|status| code(&status), |_| "Ok".to_owned()));
    }
    assert_eq!(probes, ["Ok", "Internal", "Ok"]);
    make(&mut client, "v", None, false).await;
    snapshot(&mut client, "base", "v", "0+4Ki").await;
    snapshot(&mut client, "target", "v", CHANGED).await;
    let question = delta("base", "target");
    let whole = "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK";
    let cut = "v1024[8+4 32+4] Unavailable";

    let (code, body) = lab.control("PUT", "/faults", "cut:snapshot=target,first=1").await;
    assert_eq!(code, 200, "{body}");
    assert_eq!(read(&mut client, &allocated("base"), &bound(2), Duration::ZERO).await, "v1024[0+4] OK");
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, cut);
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, whole);
    let (_, body) = lab.control("GET", "/faults", "").await;
    let rows: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((&rows[0]["calls"], &rows[0]["met"]), (&2.into(), &1.into()), "{rows}");
    let id = rows[0]["id"].as_u64().expect("a number");
    let (code, body) = lab.control("POST", "/faults", "cut:after=2\nno-such-fault").await;
    assert!(code == 400 && body.contains("no-such-fault"), "{code} {body}");
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, whole, "none of both is on");
    assert_eq!(lab.control("DELETE", &format!("/faults/{id}"), "").await.0, 204);
    assert_eq!(lab.control("DELETE", &format!("/faults/{id}"), "").await.0, 404);

    // One request.
    let mut request = tonic::Request::new(delta_of("base", "target"));
    request.metadata_mut().insert("cbt-lab-fault", "refuse:code=DATA_LOSS".parse().expect("ASCII"));
    let refused = client.metadata.get_metadata_delta(request).await.expect_err("it is marked");
    assert_eq!(refused.code(), tonic::Code::DataLoss);
    for (marker, part) in [("cutt", "there is cut"), ("", "names no fault")] {
        let mut request = tonic::Request::new(ProbeRequest {});
        request.metadata_mut().insert("cbt-lab-fault", marker.parse().expect("ASCII"));
        let refused = client.identity.probe(request).await.expect_err("no fault");
        assert!(refused.message().contains(part), "{refused}");
        let mut marked = of_snapshot("wrong", "v", "0+4Ki");
        marked.parameters.insert("cbt-lab.fault".into(), marker.into());
        let refused = client.controller.create_snapshot(marked).await.expect_err("no fault");
        assert!(refused.message().contains(part), "{refused}");
    }
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, whole);

    // All calls about one snapshot, from the class that it is made with. The driver does not see that parameter.
    let mut marked = of_snapshot("marked", "v", "0+4Ki 256Ki+4Ki 512Ki+4Ki");
    marked.parameters.insert("cbt-lab.fault".into(), "cut:after=1,code=OK,first=1".into());
    client.controller.create_snapshot(marked.clone()).await.expect("create");
    client.controller.create_snapshot(marked).await.expect("again");
    let question = delta("target", "marked");
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, "v1024[0+4 256+4] OK");
    assert_eq!(
        read(&mut client, &question, &bound(2), Duration::ZERO).await,
        "v1024[0+4 256+4] v1024[512+4] OK"
    );
    let of_other: Question = delta("base", "target");
    assert_eq!(read(&mut client, &of_other, &bound(2), Duration::ZERO).await, whole);
}
