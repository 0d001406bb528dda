//! Promise: the pages of a walk together are the driver's stream, each costs what it holds, and the API server sees none of it.

use serde_json::Value;

use crate::aggregated::{kubectl, pair};
use crate::driver::{Driver, Volume};
use crate::world::{AUDIENCE, Program, World};

/// Offset and size of each block of a page.
pub fn tuples(page: &Value) -> Vec<(u64, u64)> {
    let blocks = page["ChangeBlockList"].as_array().unwrap_or_else(|| panic!("no page: {page}"));
    let number = |block: &Value, field: &str| block[field].as_u64().expect("a number");
    blocks.iter().map(|block| (number(block, "Offset"), number(block, "Size"))).collect()
}

/// What all pages of two handles say, from `start` on: each block with its offset, its size and whether it is zero; and the size of
/// the volume. Pages but the last are full.
pub async fn walk(
    program: &Program,
    (base, target): (&str, &str),
    (start, size): (&str, u64),
    parameters: &[(&str, &str)],
) -> Result<(Vec<(u64, u64, bool)>, u64), tonic::Status> {
    let (mut all, mut at) = (Vec::new(), start.to_owned());
    loop {
        let page = program.page(base, target, &at, size, parameters).await?;
        let blocks = &page.change_block_list;
        assert!(blocks.len() as u64 == size || page.next_offset.is_empty(), "a page of {}", blocks.len());
        all.extend(blocks.iter().map(|block| (block.offset, block.size, block.zero_out)));
        if page.next_offset.is_empty() {
            return Ok((all, page.volume_size));
        }
        at = page.next_offset;
    }
}

/// The same from the listener, `size` blocks a page: the offset and the size of each block, how many pages there were, and the size
/// of the volume.
pub async fn listened(
    program: &Program,
    url: &str,
    token: &str,
    size: usize,
) -> (Vec<(u64, u64)>, usize, u64) {
    let (mut all, mut pages, mut next, mut capacity) = (Vec::new(), 0, String::new(), None);
    loop {
        let path = format!("{url}?maxEntries={size}&startOffset={next}");
        let (code, _, page) = program.get(&path, Some(token)).await;
        assert_eq!(code, 200, "{page}");
        all.extend(tuples(&page));
        pages += 1;
        let size = page["VolumeSize"].as_u64().expect("a size");
        assert_eq!(*capacity.get_or_insert(size), size, "the volume has another size");
        next = page["NextOffset"].as_str().expect("a place").to_owned();
        if next.is_empty() {
            return (all, pages, size);
        }
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
    kubectl(&["create", "-f", "-"], &world.object("walk", pair()).to_string());
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
            let walked = walk(&program, (base, target), (&from.to_string(), size), &[]).await;
            let (walked, _) = walked.expect("pages");
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
        let (told, _, capacity) = listened(&program, url, &token, size).await;
        assert_eq!((told, capacity), (expected, volume.capacity()), "{what}: {url}, pages of {size}");
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
    let walked = async |size| walk(&program, ("s0", "s1"), ("", size), &[]).await.expect("pages").0.len();
    assert_eq!(walked(10).await, 21);
    let block = |at: i64| at * 4096;
    let (deltas, allocated) = driver.asked.lock().unwrap().clone();
    // Each page begins behind the last block of the one before: nothing is read twice.
    assert_eq!(deltas, [0, block(901), block(1901)]);
    // What is held is read from the first block of each page on, and not over the wide gap.
    assert_eq!(allocated, [0, block(1000), block(19_999)]);
    // A page that spans the gap takes up the list of what is held again behind it.
    *driver.asked.lock().unwrap() = Default::default();
    assert_eq!(walked(100).await, 21);
    assert_eq!(*driver.asked.lock().unwrap(), (vec![0], vec![0, block(19_999)]));
}

pub async fn nothing_of_a_walk_reaches_the_api_server(world: World) {
    let _driver = Driver::asked_of_two(&world).await;
    let (program, token, url) = world.serves("walk", &[]).await;
    let account = format!("system:serviceaccount:{}:differential", world.namespace);
    let before = (world.read("walk").await, world.api.calls_of(&account).await);
    assert!(before.1.contains_key("patch differentialsnapshots"), "{before:?}");
    let revision = world.api.revision().await;
    assert_eq!(listened(&program, &url, &token, 1).await.1, 3, "pages");
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
    // And etcd itself.
    for (key, value) in world.api.written_since(revision).await {
        let value = String::from_utf8_lossy(&value);
        for trace in ["ChangeBlockList", "NextOffset", "ZeroOut"] {
            assert!(!value.contains(trace), "{key}: {value}");
        }
        let is_ours = key.contains("differentialsnapshots") && key.contains(&world.namespace);
        assert!(!is_ours, "{key} was written during the walk: {value}");
    }
}
