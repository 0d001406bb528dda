# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: the commands of the pages about installing, by copying them.
# shellcheck disable=SC2154,SC2317

part_pages() {
    local page=$scratch/page node
    on "$name-a" up --nodes 2
    say "the commands of docs/install.md for an existing cluster"
    # The CRDs come from the cache: nothing is fetched from the Internet here.
    commands_of docs/install.md | grep '^ *kubectl' |
        sed -E "s|-[kf] \"https://[^\"]*\"|-f $cluster_cache/crds|; s|(kubectl rollout status)|\1 --timeout 300s|" >"$page"
    [ "$(wc -l <"$page")" = 6 ] || fail "docs/install.md has other commands than this test knows: $(cat "$page")"
    (cd "$root" && on "$name-a" exec bash -euxo pipefail "$page")
    on "$name-a" exec "$root/hack/e2e.sh" --smoke --keep
    say "the commands of docs/uninstall.md, with volumes in use"
    commands_of docs/uninstall.md |
        sed 's|overlays/kind |overlays/distributed |; s|statefulset/|daemonset/|; s|^hack/remove.sh  .*|if hack/remove.sh; then exit 1; fi|' >"$page"
    [ "$(grep -c distributed "$page") $(grep -c daemonset "$page") $(grep -c '^if ' "$page")" = "1 1 1" ] ||
        fail "docs/uninstall.md has other commands than this test knows: $(cat "$page")"
    (cd "$root" && on "$name-a" exec bash -euxo pipefail "$page")
    # As the page says, of what the examples bound.
    k delete --filename "$root/deploy/examples/backup-account.yaml"
    for node in 1 2; do
        await 60 "no device of deltapath is attached on node $node" no_devices "$node" ||
            fail "loop devices or mounts are left on node $node: $(left_on "$node")"
    done
    if objects "$name-a"; then fail "objects of deltapath are left"; fi
    on "$name-a" down
    unchanged
}
