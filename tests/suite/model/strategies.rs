//! Makes random steps. The simplest choice is always first, since shrinking prefers first choices.

use proptest::prelude::*;
use proptest::strategy::Union;

use super::calls::{
    Access, Call, Cut, From, Members, Mode, MountPath, Name, NameSet, NewName, NewVolume, Node, Offset,
    Pages, Question, Ref, SPOTS, Size, Spot, Step, Use,
};
use super::life::{CLIENTS, NAMES};

const MIB: i64 = 1 << 20;
/// The number of blocks of a write.
const COUNT: u64 = 3;

fn one<T: Clone + std::fmt::Debug + 'static>(of: &[(u32, T)]) -> Union<Just<T>> {
    Union::new_weighted(of.iter().map(|(weight, value)| (*weight, Just(value.clone()))).collect())
}

fn name(of: &[char]) -> Union<Just<Name>> {
    // The first names are the most frequent.
    let weight = |at: usize| (of.len() - at) as u32;
    one(&of.iter().enumerate().map(|(at, name)| (weight(at), Name(*name))).collect::<Vec<_>>())
}

fn new_name(of: &'static [char]) -> impl Strategy<Value = NewName> {
    prop_oneof![
        40 => name(of).prop_map(NewName::Fine),
        1 => one(&[(1, NewName::Empty), (1, NewName::Long)]),
    ]
}

fn reference(of: &'static [char]) -> impl Strategy<Value = Ref> {
    prop_oneof![
        40 => name(of).prop_map(Ref::Last),
        2 => name(of).prop_map(Ref::Former),
        2 => one(&[(1, Ref::Never), (1, Ref::Nonsense), (1, Ref::Empty)]),
    ]
}

fn snapshot(of: NameSet) -> impl Strategy<Value = Ref> {
    prop_oneof![
        5 => reference(of.snapshots),
        1 => (name(of.groups), 0..2usize).prop_map(|(group, place)| Ref::Member(group, place)),
    ]
}

fn size() -> impl Strategy<Value = Size> {
    let size = |required, limit| Size { required, limit };
    one(&[
        (30, size(8 * MIB, 0)),
        (12, size(16 * MIB, 0)),
        (4, size(0, 0)),
        (4, size(8 * MIB + 1, 0)),
        (4, size(8 * MIB, 8 * MIB)),
        (1, size(0, 16 * MIB)),
        (1, size(5000, 5000)),
        (1, size(16 * MIB, 8 * MIB)),
        (1, size(-1, 0)),
        (1, size(5 << 30, 0)),
        (1, size(i64::MAX, 0)),
    ])
}

fn mode() -> impl Strategy<Value = Mode> {
    one(&[
        (10, Mode::Writer),
        (4, Mode::MultiWriter),
        (1, Mode::Reader),
        (2, Mode::Readers),
        (1, Mode::ManyNodes),
    ])
}

/// The use of an existing volume.
fn asked() -> impl Strategy<Value = Use> {
    let access = one(&[
        (30, Access::AsMade),
        (2, Access::Block),
        (2, Access::Fs("ext4")),
        (1, Access::Fs("")),
        (1, Access::Fs("xfs")),
        (1, Access::Fs("zfs")),
    ]);
    (access, mode()).prop_map(|(access, mode)| Use { access, mode })
}

/// The uses of a new volume. The mode has no effect on it, so it is the plain one, or one that is refused.
fn uses() -> impl Strategy<Value = Vec<Use>> {
    let plain = |access| Use { access, mode: Mode::Writer };
    let (block, ext4) = (plain(Access::Block), plain(Access::Fs("ext4")));
    one(&[
        (30, vec![block]),
        (16, vec![ext4]),
        (6, vec![block, ext4]),
        (2, vec![plain(Access::Fs(""))]),
        (1, vec![plain(Access::Fs("xfs"))]),
        (1, vec![ext4, plain(Access::Fs("xfs"))]),
        (1, vec![plain(Access::Fs("zfs"))]),
        (1, vec![Use { mode: Mode::ManyNodes, ..block }]),
        (1, vec![]),
    ])
}

fn new_volume(of: NameSet) -> SBoxedStrategy<Call> {
    let from = prop_oneof![
        6 => Just(From::Nothing),
        3 => snapshot(of).prop_map(From::Snapshot),
        2 => reference(of.volumes).prop_map(From::Volume),
    ];
    let block_size = one(&[(30, None), (6, Some("64Ki")), (1, Some("5Ki"))]);
    let tracking = one(&[(16, None), (1, Some(true)), (2, Some(false))]);
    let read_ahead = one(&[(30, None), (4, Some("64")), (1, Some("3"))]);
    let elsewhere = one(&[(40, false), (1, true)]);
    (new_name(of.volumes), size(), uses(), from, block_size, tracking, read_ahead, elsewhere)
        .prop_map(|(name, size, uses, from, block_size, tracking, read_ahead, elsewhere)| {
            // A volume with a source usually takes its size.
            let size = match (&from, size.limit) {
                (From::Nothing, _) | (_, 1..) => size,
                _ if size.required == 8 * MIB => Size { required: 0, limit: 0 },
                _ => size,
            };
            Call::CreateVolume(NewVolume {
                name,
                size,
                uses,
                from,
                block_size,
                tracking,
                read_ahead,
                elsewhere,
            })
        })
        .sboxed()
}

/// A volume, a staging path and a target, which usually belong to the volume.
fn placed(of: NameSet) -> impl Strategy<Value = (Ref, MountPath, MountPath)> {
    let number = || one(&[(8, 0u8), (2, 1), (1, SPOTS - 1)]);
    let owner = prop_oneof![20 => Just(None), 1 => name(of.volumes).prop_map(Some)];
    let empty = one(&[(30, (false, false)), (1, (true, false)), (1, (false, true))]);
    (reference(of.volumes), owner, number(), number(), empty).prop_map(
        move |(volume, owner, one, two, empty)| {
            let own = match volume {
                Ref::Last(name) | Ref::Former(name) => name,
                _ => Name(of.volumes[0]),
            };
            let spot = |number| Spot { name: owner.unwrap_or(own), number };
            let staging = if empty.0 { MountPath::Empty } else { MountPath::Staging(spot(one)) };
            let target = if empty.1 { MountPath::Empty } else { MountPath::Target(spot(two)) };
            (volume, staging, target)
        },
    )
}

/// A volume and one of its places.
fn at(of: NameSet) -> impl Strategy<Value = (Ref, MountPath)> {
    (placed(of), one(&[(1, true), (1, false)]))
        .prop_map(|((volume, staging, target), first)| (volume, if first { staging } else { target }))
}

fn pages() -> impl Strategy<Value = Pages> {
    let pages = |most| Pages { most, bad_token: false };
    one(&[
        (2, Pages::ALL),
        (3, pages(1)),
        (3, pages(2)),
        (1, pages(-1)),
        (1, Pages { bad_token: true, ..Pages::ALL }),
    ])
}

fn style() -> impl Strategy<Value = Option<&'static str>> {
    one(&[(12, None), (3, Some("fixed")), (1, Some("blue"))])
}

fn cut() -> impl Strategy<Value = Cut> {
    let offset = one(&[
        (8, Offset::At(0)),
        (2, Offset::At(4096)),
        (2, Offset::At(5000)),
        (1, Offset::At(-1)),
        (2, Offset::BehindEnd(0)),
        (1, Offset::BehindEnd(1)),
    ]);
    (offset, one(&[(6, 0), (2, 1), (2, 2), (1, i32::MAX), (1, -1)]))
        .prop_map(|(offset, most)| Cut { offset, most })
}

fn members() -> impl Strategy<Value = Members> {
    one(&[(5, Members::All), (1, Members::ButOne)])
}

fn controller(of: NameSet) -> SBoxedStrategy<Call> {
    let volume = || reference(of.volumes);
    let read_only = || one(&[(6, false), (1, true)]);
    let node = || one(&[(10, Node::This), (1, Node::Another), (1, Node::Empty)]);
    let questions = prop_oneof![
        1 => (volume(), asked()).prop_map(|(volume, asked)| Call::Validate { volume, asked }),
        2 => pages().prop_map(Call::ListVolumes),
        1 => volume().prop_map(Call::GetVolume),
        1 => pages().prop_map(Call::ListHealth),
        1 => volume().prop_map(Call::GetHealth),
        1 => proptest::option::weighted(0.5, asked()).prop_map(|asked| Call::GetCapacity { asked }),
    ];
    prop_oneof![
        16 => new_volume(of),
        6 => volume().prop_map(Call::DeleteVolume),
        2 => (volume(), node(), asked(), read_only()).prop_map(|(volume, node, asked, read_only)| {
            Call::ControllerPublish { volume, node, asked, read_only }
        }),
        2 => (volume(), node()).prop_map(|(volume, node)| Call::ControllerUnpublish { volume, node }),
        7 => questions,
        3 => (volume(), size(), proptest::option::weighted(0.3, asked()))
            .prop_map(|(volume, size, asked)| Call::Expand { volume, size, asked }),
        2 => (volume(), one(&[(4, "64"), (3, "512"), (1, "3")]))
            .prop_map(|(volume, read_ahead)| Call::Modify { volume, read_ahead, direct_io: None }),
    ]
    .sboxed()
}

fn snapshots(of: NameSet) -> SBoxedStrategy<Call> {
    let group = || reference(of.groups);
    let optional = || proptest::option::weighted(0.4, reference(of.volumes));
    prop_oneof![
        12 => (new_name(of.snapshots), reference(of.volumes), style())
            .prop_map(|(name, volume, style)| Call::CreateSnapshot { name, volume, style }),
        6 => snapshot(of).prop_map(Call::DeleteSnapshot),
        2 => (pages(), optional(), proptest::option::weighted(0.2, snapshot(of)))
            .prop_map(|(pages, of, only)| Call::ListSnapshots { pages, of, only }),
        1 => snapshot(of).prop_map(Call::GetSnapshot),
        5 => (new_name(of.groups), prop::collection::vec(reference(of.volumes), 0..4), style())
            .prop_map(|(name, volumes, style)| Call::CreateGroup { name, volumes, style }),
        3 => (group(), members()).prop_map(|(group, members)| Call::DeleteGroup { group, members }),
        2 => (group(), members()).prop_map(|(group, members)| Call::GetGroup { group, members }),
        2 => (snapshot(of), cut()).prop_map(|(snapshot, cut)| Call::Allocated { snapshot, cut }),
        4 => (snapshot(of), snapshot(of), cut())
            .prop_map(|(base, target, cut)| Call::Delta { base, target, cut }),
    ]
    .sboxed()
}

fn node(of: NameSet) -> SBoxedStrategy<Call> {
    let read_only = || one(&[(6, false), (1, true)]);
    let ephemeral = || {
        (name(of.ephemeral), one(&[(6, 0u8), (1, 1)]), one(&[(12, false), (1, true)])).prop_map(
            |(handle, number, empty)| match empty {
                true => (handle, MountPath::Empty),
                false => (handle, MountPath::Target(Spot { name: handle, number })),
            },
        )
    };
    let filesystem = (
        one(&[(8, Access::Fs("ext4")), (2, Access::Fs("")), (1, Access::Block), (1, Access::Fs("zfs"))]),
        mode(),
    )
        .prop_map(|(access, mode)| Use { access, mode });
    prop_oneof![
        10 => (placed(of), asked()).prop_map(|((volume, at, _), asked)| Call::Stage { volume, at, asked }),
        4 => placed(of).prop_map(|(volume, at, _)| Call::Unstage { volume, at }),
        10 => (placed(of), asked(), read_only()).prop_map(|((volume, staged, at), asked, read_only)| {
            Call::Publish { volume, staged, at, asked, read_only }
        }),
        6 => placed(of).prop_map(|(volume, _, at)| Call::Unpublish { volume, at }),
        3 => (ephemeral(), filesystem, one(&[(6, "8Mi"), (1, "16Mi"), (1, "big")]), read_only()).prop_map(
            |((handle, at), asked, size, read_only)| {
                Call::PublishEphemeral { handle, at, asked, size, read_only }
            }
        ),
        2 => ephemeral().prop_map(|(handle, at)| Call::UnpublishEphemeral { handle, at }),
        2 => at(of).prop_map(|(volume, at)| Call::Stats { volume, at }),
        1 => at(of).prop_map(|(volume, at)| Call::NodeHealth { volume, at }),
        2 => (at(of), size(), proptest::option::weighted(0.3, asked()))
            .prop_map(|((volume, at), size, asked)| Call::NodeExpand { volume, at, size, asked }),
    ]
    .sboxed()
}

/// Any call, legal or not.
pub fn call(of: NameSet) -> SBoxedStrategy<Call> {
    let question = one(&[
        (1, Question::Probe),
        (1, Question::GetPluginInfo),
        (1, Question::GetPluginCapabilities),
        (1, Question::ControllerGetCapabilities),
        (1, Question::GroupControllerGetCapabilities),
        (1, Question::NodeGetCapabilities),
        (1, Question::NodeGetInfo),
        (1, Question::NodeGetStorageHealth),
    ]);
    prop_oneof![
        12 => controller(of),
        12 => snapshots(of),
        13 => node(of),
        1 => question.prop_map(Call::Ask),
    ]
    .sboxed()
}

/// Adapts a call to be concurrent with others. A list is one page, since pages of different moments need not fit together.
/// A place belongs to the volume, since kubelet does not use one place for two volumes.
fn apart(mut call: Call) -> Call {
    match &mut call {
        Call::ListVolumes(pages) | Call::ListHealth(pages) | Call::ListSnapshots { pages, .. }
            if pages.most > 0 =>
        {
            *pages = Pages::ALL;
        }
        Call::Stage { volume, at, .. } | Call::Unstage { volume, at } | Call::Unpublish { volume, at } => {
            own(volume, at);
        }
        Call::Publish { volume, staged, at, .. } => {
            own(volume, staged);
            own(volume, at);
        }
        _ => {}
    }
    call
}

fn own(volume: &Ref, place: &mut MountPath) {
    let (Ref::Last(name) | Ref::Former(name)) = volume else { return };
    match place {
        MountPath::Staging(spot) | MountPath::Target(spot) => spot.name = *name,
        MountPath::Empty => {}
    }
}

fn written() -> impl Strategy<Value = Step> {
    let block = || one(&[(6, 0u64), (3, 15), (2, 1000), (2, 2045), (2, 4093)]);
    prop_oneof![
        5 => (name(NAMES.volumes), block(), 0..4u8)
            .prop_map(|(volume, block, fill)| Step::Write { volume, block, count: COUNT, fill }),
        1 => (name(NAMES.volumes), block()).prop_map(|(volume, block)| Step::Discard { volume, block, count: COUNT }),
    ]
}

/// A call that changes something. To interrupt other calls tests nothing.
fn mutating() -> impl Strategy<Value = Call> {
    let changes = |call: &Call| {
        !matches!(
            call,
            Call::Validate { .. }
                | Call::ListVolumes(_)
                | Call::GetVolume(_)
                | Call::ListHealth(_)
                | Call::GetHealth(_)
                | Call::GetCapacity { .. }
                | Call::ListSnapshots { .. }
                | Call::GetSnapshot(_)
                | Call::GetGroup { .. }
                | Call::Stats { .. }
                | Call::NodeHealth { .. }
                | Call::Allocated { .. }
                | Call::Delta { .. }
                | Call::Ask(_)
        )
    };
    call(NAMES).prop_filter("it only asks", changes).prop_map(apart)
}

fn killed(most: usize) -> BoxedStrategy<Step> {
    let after =
        one(&[(1, 0u64), (2, 300), (3, 600), (4, 1200), (4, 2400), (3, 5000), (2, 10_000), (1, 20_000)]);
    (prop::collection::vec(mutating(), 1..=most), after)
        .prop_map(|(calls, after)| Step::Killed { calls, after })
        .boxed()
}

/// The first steps make volumes in use and snapshots, so that a life does not depend on chance for them.
fn opening() -> BoxedStrategy<Vec<Step>> {
    let access = one(&[(2, Access::Block), (1, Access::Fs("ext4"))]);
    let mode = one(&[(2, Mode::Writer), (1, Mode::MultiWriter)]);
    let set = one(&[(6, Before::Nothing), (2, Before::Modify), (1, Before::AttachForReading)]);
    let volumes = prop::collection::vec((access, mode, set, 1..8usize), 0..=NAMES.volumes.len());
    let grouped = one(&[(2, false), (1, true)]);
    let steps = (volumes, grouped).prop_map(|(volumes, grouped)| {
        let count = volumes.len();
        let named = NAMES
            .volumes
            .iter()
            .zip(NAMES.snapshots)
            .map(|(volume, snapshot)| (Name(*volume), Name(*snapshot)));
        let lives = named.zip(volumes);
        let mut steps: Vec<Step> = lives
            .flat_map(|(named, (access, mode, before, far))| used(named, access, mode, before, far))
            .collect();
        if grouped && count > 0 {
            let volumes = NAMES.volumes.iter().take(count).map(|name| Ref::Last(Name(*name))).collect();
            let name = NewName::Fine(Name(NAMES.groups[0]));
            steps.push(Step::One(Call::CreateGroup { name, volumes, style: None }));
        }
        steps
    });
    steps.boxed()
}

/// The change of a volume before it is staged.
#[derive(Clone, Copy, Debug)]
enum Before {
    Nothing,
    Modify,
    AttachForReading,
}

/// The first steps of a volume's life, `far` of them.
fn used((name, snapshot): (Name, Name), access: Access, mode: Mode, before: Before, far: usize) -> Vec<Step> {
    let spot = Spot { name, number: 0 };
    let (volume, staged, at) = (Ref::Last(name), MountPath::Staging(spot), MountPath::Target(spot));
    let asked = Use { access: Access::AsMade, mode };
    let new = NewVolume::plain(name, access, 8 * MIB, From::Nothing);
    let before = match before {
        Before::Nothing => None,
        Before::Modify => Some(Call::Modify { volume, read_ahead: "512", direct_io: None }),
        Before::AttachForReading => {
            Some(Call::ControllerPublish { volume, node: Node::This, asked, read_only: true })
        }
    };
    let taken = |name| Step::One(Call::CreateSnapshot { name: NewName::Fine(name), volume, style: None });
    let steps = [Step::One(Call::CreateVolume(new))].into_iter().chain(before.map(Step::One)).chain([
        Step::One(Call::Stage { volume, at: staged, asked }),
        Step::One(Call::Publish { volume, staged, at, asked, read_only: false }),
        Step::Write { volume: name, block: 0, count: COUNT, fill: 1 },
        taken(snapshot),
        Step::Write { volume: name, block: 15, count: COUNT, fill: 2 },
        taken(Name(NAMES.snapshots[NAMES.snapshots.len() - 1])),
    ]);
    steps.take(far).collect()
}

/// A life of one client at a time.
pub fn alone() -> BoxedStrategy<Vec<Step>> {
    let step = prop_oneof![
        30 => call(NAMES).prop_map(Step::One),
        6 => written(),
        3 => killed(1),
        1 => Just(Step::Restart),
        1 => Just(Step::Crash),
    ];
    life(step)
}

/// A life of several clients at once.
pub fn together() -> BoxedStrategy<Vec<Step>> {
    let step = prop_oneof![
        4 => call(NAMES).prop_map(Step::One),
        20 => prop::collection::vec(call(NAMES).prop_map(apart), 1..=CLIENTS).prop_map(Step::Together),
        3 => written(),
        3 => killed(3),
        1 => Just(Step::Crash),
    ];
    life(step)
}

fn life(step: impl Strategy<Value = Step> + 'static) -> BoxedStrategy<Vec<Step>> {
    let lived = (opening(), prop::collection::vec(step, 1..50));
    let whole = lived.prop_map(|(mut steps, more)| {
        steps.extend(more);
        steps
    });
    whole.boxed()
}
