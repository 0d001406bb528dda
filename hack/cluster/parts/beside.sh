# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: two clusters beside each other do not meet.
# shellcheck disable=SC2154,SC2317

part_beside() {
    local cluster sum
    for cluster in "$name-a" "$name-b"; do
        on "$cluster" up
        on "$cluster" install
        on "$cluster" exec kubectl apply --filename "$root/deploy/examples/block.yaml"
        on "$cluster" exec kubectl wait --for condition=ready --timeout 120s pod/block
    done
    # Each is asked for its own: the two have the same addresses and names.
    for cluster in "$name-a" "$name-b"; do
        on "$cluster" exec kubectl create configmap mine --from-literal "cluster=$cluster"
    done
    for cluster in "$name-a" "$name-b"; do
        [ "$(on "$cluster" exec kubectl get configmap mine --output 'jsonpath={.data.cluster}')" = "$cluster" ] ||
            fail "$cluster answers for another cluster"
    done
    block() { on "$name-b" exec kubectl exec block -- sh -c "$1"; }
    sum=$(block 'dd if=/dev/urandom of=/tmp/data bs=1M count=16 && dd if=/tmp/data of=/dev/volume bs=1M conv=fsync && sha256sum </tmp/data' 2>/dev/null)
    say "one is taken down, with a volume in use"
    on "$name-a" down
    [ "$(block 'dd if=/dev/volume bs=1M count=16 iflag=direct | sha256sum' 2>/dev/null)" = "$sum" ] ||
        fail "the volume of the other cluster holds other bytes"
    block 'dd if=/tmp/data of=/dev/volume bs=1M seek=16 conv=fsync' || fail "the other cluster's volume takes no writes"
    on "$name-b" exec "$root/hack/e2e.sh" --smoke
    on "$name-b" down
    unchanged
}
