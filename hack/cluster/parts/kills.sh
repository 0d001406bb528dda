# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: nothing is left on the machine, however a cluster ends.
# shellcheck disable=SC2154,SC2317

# Attaches loop devices and mounts in a pod, as the driver does.
busy() {
    on "$1" exec kubectl apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/filesystem.yaml"
    on "$1" exec kubectl wait --for condition=ready --timeout 120s pod/block pod/files
}

part_kills() {
    in_use() {
        on "$name-a" up
        on "$name-a" install
        busy "$name-a"
    }
    local victim process
    say "kubelet killed, then a cluster in use taken down"
    in_use
    on "$name-a" exec pkill -KILL -x kubelet
    await 60 "kubelet is started again" on "$name-a" exec pgrep -x kubelet || fail "kubelet is not started again"
    await 60 "kubelet serves" k exec block -- true || fail "kubelet does not serve"
    on "$name-a" down
    unchanged
    for victim in supervisor unshare node; do
        say "SIGKILL of $victim, with volumes in use"
        in_use
        process=$(cat "$clusters/$name-a/unshare.pid")
        case "$victim" in
            supervisor) process=$(ps -o ppid= "$process" | tr -d ' ') ;;
            node) process=$(pgrep -P "$(pgrep -d , -P "$(pgrep -P "$process")")" -x unshare) ;;
        esac
        kill -KILL "$process"
        # The supervisor sweeps up; after its own death the next command does.
        if [ "$victim" != supervisor ]; then
            await 60 "the cluster ended and was swept up" grep -q "the cluster ended" "$clusters/$name-a/cluster.log" ||
                fail "the cluster does not end"
            unchanged
        fi
        on "$name-a" down
        unchanged
    done
    say "SIGKILL in the middle of up"
    for moment in 0.5 2 5 9 16; do
        CLUSTER=$name-a setsid "$root/hack/cluster.sh" up >/dev/null 2>&1 &
        process=$!
        sleep "$moment"
        kill -KILL -- -"$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
        on "$name-a" down
        unchanged
    done
}
