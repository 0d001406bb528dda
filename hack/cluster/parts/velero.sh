# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: a Velero that the user brings, behind each of the services that it can ask, and on two nodes.
# shellcheck disable=SC2154,SC2317

part_velero() {
    local how archives nodes
    read -ra archives <<<"${VELERO_ARCHIVES-}"
    for how in "" "--overlay community-sidecar" --distributed; do
        nodes=1
        [ "$how" != --distributed ] || nodes=2
        say "Velero on $nodes nodes, install $how"
        on "$name-a" up --nodes "$nodes"
        # shellcheck disable=SC2086 # an option and its value
        on "$name-a" install $how
        [ ${#archives[@]} -eq 0 ] || on "$name-a" load "${archives[@]}"
        on "$name-a" exec "$root/hack/velero-test.sh"
        on "$name-a" down
    done
    unchanged
}
