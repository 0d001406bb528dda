# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: clients that others wrote, on one node and on two.
# shellcheck disable=SC2154,SC2317

part_clients() {
    local nodes distributed=()
    for nodes in 1 2; do
        on "$name-a" up --nodes "$nodes"
        on "$name-a" install "${distributed[@]}"
        on "$name-a" exec "$root/hack/clients-test.sh"
        on "$name-a" down
        distributed=(--distributed)
    done
    unchanged
}
