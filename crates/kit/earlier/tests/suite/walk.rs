//! Promise: the pages of a walk together are the driver's stream, each costs what it holds, and the API server sees none of it.

use serde_json::Value;

use crate::aggregated::kubectl;
use crate::driver::{Driver, Volume};
use crate::world::{AUDIENCE, Program, World};

/// Offset and size of each block of a page.
pub fn tuples(page: &Value) -> Vec<(u64, u64)> {
    let blocks = page["ChangeBlockList"].as_array().unwrap_or_else(|| panic!("no page: {page}"));
    let number = |block: &Value, field: &str| block[field].as_u64().expect("a number");
    blocks.iter().map(|block| (number(block, "Offset"), number(block, "Size"))).collect()
}

/// What all pages say: offset, size and whether it is zero. Pages but the last are full.
async fn walk(program: &Program, base: &str, target: &str, start: &str, size: u64) -> Vec<(u64, u64, bool)> {
    let (mut all, mut at) = (Vec::new(), start.to_owned());
    loop {
        let page = program.page(base, target, &at, size, &[]).await.expect("a page");
        let blocks = &page.change_block_list;
        assert!(blocks.len() as u64 == size || page.next_offset.is_empty(), "a page of {}", blocks.len());
        all.extend(blocks.iter().map(|block| (block.offset, block.size, block.zero_out)));
        if page.next_offset.is_empty() {
            return all;
        }
        at = page.next_offset;
    }
}

pub async fn a_user_walks_two_pages_with_kubectl(world: World) {
    let volume = Volume::small();
    let expected = volume.tuples(Some("s0"), "s1", 0).expect("tuples");
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    world.two_snapshots().await;
    let program = world.start(&[]).await;
    world.user("user").await;
    let kubectl = |arguments: &[&str], input: &str| {
        let output = kubectl(&world, arguments, input);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "kubectl {arguments:?}: {error}");
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    };
    let spec = serde_json::json!({"baseVolumeSnapshotName": "monday", "targetVolumeSnapshotName": "tuesday"});
    kubectl(&["create", "-f", "-"], &world.object("walk", spec).to_string());
    kubectl(&["wait", "diffsnap/walk", "--for=jsonpath={.status.state}=url-ready", "--timeout=60s"], "");
    let url = kubectl(&["get", "diffsnap/walk", "-o", "jsonpath={.status.callbackURL}"], "");
    let table = kubectl(&["get", "diffsnap"], "");
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "BASE", "TARGET", "STATE", "AGE"]);
    assert_eq!(lines[1][..4], ["walk", "monday", "tuesday", "url-ready"]);
    let token = kubectl(&["create", "token", "user", "--audience", AUDIENCE], "");
    let size = expected.len() - 1;
    let (code, _, first) = program.get(&format!("{url}?maxEntries={size}"), Some(&token)).await;
    assert_eq!(code, 200, "{first}");
    let next = first["NextOffset"].as_str().expect("a place");
    assert!(!next.is_empty(), "only one page");
    let (code, _, second) =
        program.get(&format!("{url}?maxEntries={size}&startOffset={next}"), Some(&token)).await;
    assert_eq!((code, &second["NextOffset"]), (200, &Value::from("")));
    assert_eq!([tuples(&first), tuples(&second)].concat(), expected);
}

pub async fn pages_together_are_the_stream(world: World) {
    let mut random = fastrand::Rng::with_seed(testkit::seed("pages of random volumes"));
    let driver = Driver::start(&world.driver, &world.csi, Volume::random(&mut random, 3));
    for snapshot in ["s0", "s1", "s2"] {
        world.snapshot(snapshot, snapshot).await;
    }
    world.ask("delta", Some("s0"), "s2").await;
    world.ask("full", None, "s2").await;
    let program = world.start(&[]).await;
    let token = world.user("user").await;
    let urls = [("s0", world.url("delta").await), ("", world.url("full").await)];
    for life in 0..40 {
        let volume = Volume::random(&mut random, 3);
        *driver.volume.lock().unwrap() = volume.clone();
        let what = format!("life {life}");
        for (base, target) in
            [("s0", "s1"), ("s1", "s2"), ("s0", "s2"), ("s2", "s0"), ("s1", "s1"), ("", "s1")]
        {
            let known = Some(base).filter(|base| !base.is_empty());
            let from = if random.bool() { 0 } else { random.u64(..=volume.capacity()) };
            let expected = volume.tuples(known, target, from).expect("tuples");
            let size = random.u64(1..=expected.len() as u64 + 2);
            let walked = walk(&program, base, target, &from.to_string(), size).await;
            let told: Vec<_> = walked.iter().map(|(offset, length, _)| (*offset, *length)).collect();
            assert_eq!(told, expected, "{what}: {base} to {target} from {from}, pages of {size}");
            for (offset, length, is_zero) in walked {
                let is_hole = known.is_some() && volume.is_hole(target, (offset, length));
                assert_eq!(is_zero, is_hole, "{what}: {base} to {target} at {offset}");
            }
        }
        // The same through the listener, with the size of the volume.
        let (base, url) = &urls[life % 2];
        let known = Some(*base).filter(|base| !base.is_empty());
        let expected = volume.tuples(known, "s2", 0).expect("tuples");
        let size = 1 + expected.len() / random.usize(1..4);
        let (mut told, mut next) = (Vec::new(), String::new());
        loop {
            let (code, _, page) =
                program.get(&format!("{url}?maxEntries={size}&startOffset={next}"), Some(&token)).await;
            assert_eq!((code, page["VolumeSize"].as_u64()), (200, Some(volume.capacity())), "{what}: {page}");
            told.extend(tuples(&page));
            next = page["NextOffset"].as_str().expect("a place").to_owned();
            if next.is_empty() {
                break;
            }
        }
        assert_eq!(told, expected, "{what}: {url}, pages of {size}");
    }
}

pub async fn a_page_begins_where_the_one_before_ended(world: World) {
    // All blocks are held; every hundredth differs, and then one far behind them.
    let held = vec![1; 20_000];
    let mut changed = held.clone();
    for at in (0..2_000).step_by(100).chain([19_999]) {
        changed[at] = 2;
    }
    let driver = Driver::start(&world.driver, &world.csi, Volume::pair(held, changed));
    let program = world.start(&[]).await;
    assert_eq!(walk(&program, "s0", "s1", "", 10).await.len(), 21);
    let block = |at: i64| at * 4096;
    let (deltas, allocated) = driver.asked.lock().unwrap().clone();
    // Each page begins behind the last block of the one before: nothing is read twice.
    assert_eq!(deltas, [0, block(901), block(1901)]);
    // What is held is read from the first block of each page on, and not over the wide gap.
    assert_eq!(allocated, [0, block(1000), block(19_999)]);
    // A page that spans the gap takes up the list of what is held again behind it.
    *driver.asked.lock().unwrap() = Default::default();
    assert_eq!(walk(&program, "s0", "s1", "", 100).await.len(), 21);
    assert_eq!(*driver.asked.lock().unwrap(), (vec![0], vec![0, block(19_999)]));
}

pub async fn nothing_of_a_walk_reaches_the_api_server(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    world.ask_of_two().await;
    let (program, token, url) = world.serves("walk", &[]).await;
    let account = format!("system:serviceaccount:{}:differential", world.namespace);
    let before = (world.read("walk").await, world.api.calls_of(&account).await);
    assert!(before.1.contains_key("patch differentialsnapshots"), "{before:?}");
    let revision = world.api.revision().await;
    let (mut pages, mut next) = (0, String::new());
    loop {
        let (code, _, page) =
            program.get(&format!("{url}?maxEntries=1&startOffset={next}"), Some(&token)).await;
        assert_eq!(code, 200, "{page}");
        pages += 1;
        next = page["NextOffset"].as_str().expect("a place").to_owned();
        if next.is_empty() {
            break;
        }
    }
    assert_eq!(pages, 3);
    assert_eq!(world.read("walk").await, before.0, "the object has changed");
    let mut asked = 0;
    for (call, count) in world.api.calls_of(&account).await {
        let more = count - before.1.get(&call).copied().unwrap_or(0);
        asked += more;
        let is_write = ["create", "update", "patch", "delete"].iter().any(|verb| call.starts_with(verb));
        // Reviews are answered and not stored; the lease is renewed meanwhile.
        let is_stored = is_write && !call.contains("reviews") && !call.ends_with("leases");
        assert!(!is_stored || more == 0, "{call}: {more} more");
    }
    assert!(asked > 0, "the audit log tells nothing");
    // And etcd itself. The watch has seen what it should: the marker, with its content.
    let marker = format!("marker-{}", world.namespace);
    world.api.namespace(&marker).await;
    let written = world.api.written_since(revision, &marker).await;
    assert!(written.iter().any(|(key, value)| key.contains(&marker) && !value.is_empty()), "{written:?}");
    for (key, value) in &written {
        let value = String::from_utf8_lossy(value);
        for trace in ["ChangeBlockList", "NextOffset", "ZeroOut"] {
            assert!(!value.contains(trace), "{key}: {value}");
        }
        let is_ours = key.contains("differentialsnapshots") && key.contains(&world.namespace);
        assert!(!is_ours, "{key} was written during the walk: {value}");
    }
}
