//! Many concurrent clients make any call, legal or not. No model can follow so many (`model` follows a few), so the test
//! only checks the codes, and that everything can be undone at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::hostile::allowed;
use crate::model::calls::{Call, Name, NameSet};
use crate::model::names::{Asked, Names};
use crate::model::strategies::call;
use crate::model::wire::{Answer, make};
use testkit::prelude::*;

const CLIENTS: u8 = 32;
/// So few names that two snapshots often have the same volume.
const NAMES: NameSet = NameSet {
    volumes: &['a', 'b', 'c', 'd', 'e', 'f'],
    snapshots: &['a', 'b', 'c', 'd', 'e', 'f'],
    groups: &['a', 'b', 'c', 'd'],
    ephemeral: &['x', 'y', 'z'],
};

/// How long the test runs; `DELTAPATH_CHAOS_SECONDS` sets another time.
fn seconds() -> u64 {
    testkit::asked("DELTAPATH_CHAOS_SECONDS").unwrap_or(20)
}

/// Makes random calls until `end`. Returns the RPC, the code and the message of each.
async fn caller(
    mut client: Client,
    number: u8,
    names: Arc<Mutex<Arc<Names>>>,
    end: Instant,
) -> Vec<(String, Code, String)> {
    let calls = call(NAMES);
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[number; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    let mut answers = Vec::new();
    while Instant::now() < end {
        let call = calls.new_tree(&mut runner).expect("a call").current();
        let known = names.lock().expect("names").clone();
        let asked = Asked { call, names: known };
        let (code, said) = match make(&mut client, &asked).await {
            Answer::Done(reply) => {
                Arc::make_mut(&mut names.lock().expect("names")).learn(&asked.call, &reply);
                (Code::Ok, String::new())
            }
            Answer::Failed(code, said) => (code, said),
            Answer::Cut => (Code::Unavailable, "the connection broke".into()),
        };
        answers.push((asked.call.method(), code, said));
    }
    answers
}

/// The targets and the staging path in a volume's record.
fn places(rig: &Rig, volume: &str) -> (Vec<String>, Option<String>) {
    let state = state_of(&rig.pool_dir(), volume);
    let published = state["published"].as_array().cloned().unwrap_or_default();
    let targets = published.iter().map(|entry| entry["target"].as_str().expect("a path").to_owned());
    (targets.collect(), state["staged"]["path"].as_str().map(str::to_owned))
}

/// Unpublishes, unstages, detaches and deletes everything.
async fn clear(rig: &mut Rig, names: &Arc<Names>) {
    for (handle, at) in
        NAMES.ephemeral.iter().flat_map(|name| NAMES.places().into_iter().map(|at| (Name(*name), at)))
    {
        let asked = Asked { call: Call::UnpublishEphemeral { handle, at }, names: names.clone() };
        // Fails if another volume is published there.
        make(&mut rig.client, &asked).await;
    }
    let list = proto::ListVolumesRequest::default();
    let list = rig.client.controller.list_volumes(list).await.expect("list").into_inner();
    for volume_id in list.entries.into_iter().map(|entry| entry.volume.expect("a volume").volume_id) {
        let (targets, staged) = places(rig, &volume_id);
        for target_path in targets {
            let request = requests::unpublish(&volume_id, target_path);
            rig.client.node.node_unpublish_volume(request).await.expect("unpublish");
        }
        if let Some(staging_target_path) = staged {
            let request = requests::unstage(&volume_id, staging_target_path);
            rig.client.node.node_unstage_volume(request).await.expect("unstage");
        }
        let request = requests::detach(&volume_id, "");
        rig.client.controller.controller_unpublish_volume(request).await.expect("detach");
        rig.client.delete_volume(&volume_id).await.expect("delete");
    }
    for (group, members) in names.groups.values().flatten() {
        rig.client.delete_group(group, members).await.expect("delete");
    }
    for snapshot in names.snapshots.values().flatten() {
        rig.client.delete_snapshot(snapshot).await.expect("delete");
    }
}

/// 32 clients make random calls for a while. The driver does not panic, returns only codes that the spec lists for the
/// call, and leaks nothing.
#[apply(device_test)]
async fn many_clients_doing_anything_leave_a_driver_that_is_well() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--enable-attach"], "error").await;
    let known = Arc::new(Mutex::new(Arc::new(Names::below(rig.kubelet(), NAMES))));
    let end = Instant::now() + Duration::from_secs(seconds());
    let mut callers = Vec::new();
    for number in 0..CLIENTS {
        let client = Client::connect(&rig.socket(), Duration::ZERO).await.expect("connect");
        callers.push(tokio::spawn(caller(client, number, known.clone(), end)));
    }
    let mut counts = BTreeMap::<(String, String), usize>::new();
    let mut wrong = BTreeSet::new();
    for caller in callers {
        for (method, code, said) in caller.await.expect("a client") {
            if !allowed(&method, code) {
                wrong.insert(format!("{method} answered {code:?}: {said}"));
            }
            *counts.entry((method, format!("{code:?}"))).or_default() += 1;
        }
    }
    let calls: usize = counts.values().sum();
    println!("{calls} calls by {CLIENTS} clients: {counts:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(!rig.log().contains("panicked"), "{}", rig.log());
    let needed = [
        "CreateVolume",
        "CreateSnapshot",
        "NodePublishVolume",
        "CreateVolumeGroupSnapshot",
        "GetMetadataDelta",
    ];
    for method in needed {
        assert!(counts.contains_key(&(method.to_owned(), "Ok".to_owned())), "{method} never succeeded");
    }
    let known = known.lock().expect("names").clone();
    clear(&mut rig, &known).await;
    testkit::no_device_left(&rig.pool_dir());
    crate::faults::assert_nothing_half_made(&rig).await;
    for dir in ["volumes", "snapshots", "groups"] {
        let left = names(&rig.pool_dir().join(dir));
        assert!(left.is_empty(), "{dir} holds {left:?}");
    }
    rig.finish();
}
