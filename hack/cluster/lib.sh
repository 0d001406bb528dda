# shellcheck shell=bash
# What hack/cluster.sh and hack/cluster-deps.sh share: where the programs are, and which there are. Sourced, not run.
# shellcheck disable=SC2034
# shellcheck source=hack/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

kubernetes_programs=(etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)
# The others: the directory of the module below hack, the package, and the version that is stamped or told.
other_programs=(
    "cluster/containerd github.com/containerd/containerd/v2/cmd/containerd"
    "cluster/containerd github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"
    "cluster/containerd github.com/containerd/containerd/v2/cmd/ctr"
    "cluster/coredns ./coredns"
    "cluster/sidecars ./pause"
    "cluster/sidecars ./standin-csi-external-health-monitor-controller"
    "cluster/sidecars ./standin-csi-node-driver-registrar"
    "cluster/sidecars ./standin-livenessprobe"
    "cluster/sidecars github.com/kubernetes-csi/external-attacher/v4/cmd/csi-attacher"
    "cluster/sidecars github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer"
    "cluster/sidecars github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter"
    "cluster/sidecars github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller"
    "cluster/provisioner github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner"
    "sidecar github.com/kubernetes-csi/external-snapshot-metadata/cmd/csi-snapshot-metadata"
    "manifests helm.sh/helm/v3/cmd/helm"
)
# Images of one program: the program, and the image's name in the manifests.
registry=registry.k8s.io/sig-storage
program_images=(
    "pause registry.k8s.io/pause:3.10.2"
    "csi-attacher $registry/csi-attacher:v4.13.0"
    "csi-provisioner $registry/csi-provisioner:v6.4.0"
    "csi-resizer $registry/csi-resizer:v2.3.0"
    "csi-snapshotter $registry/csi-snapshotter:v8.7.0"
    "snapshot-controller $registry/snapshot-controller:v8.7.0"
    "csi-snapshot-metadata $registry/csi-snapshot-metadata:v1.1.0"
    "standin-csi-node-driver-registrar $registry/csi-node-driver-registrar:v2.17.0"
    "standin-livenessprobe $registry/livenessprobe:v2.20.0"
    "standin-csi-external-health-monitor-controller $registry/csi-external-health-monitor-controller:v0.19.0"
)
pause_image=registry.k8s.io/pause:3.10.2
busybox_image=docker.io/library/busybox:1.37.0

# One directory for all versions that hack names, so that a change of one builds again and a second tree shares it.
module_version() { awk -v module="$2" '$1 == module { print $2 } $1 == "require" && $2 == module { print $3 }' "$root/hack/$1/go.mod"; }
cache=${DELTAPATH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deltapath}
kubernetes_bin=$cache/kubernetes-$(module_version kubernetes k8s.io/kubernetes)-etcd-$(module_version etcd go.etcd.io/etcd/server/v3)
sources() { find "$root/hack/cluster" "$root/hack/sidecar" "$root/hack/manifests/go.mod" -name '*.go' -o -name go.mod -o -name go.sum; }
cluster_cache=$cache/cluster-$({ sources | sort | xargs cat; } | sha256sum | cut -c 1-12)

# Kubernetes' storage suites: the programs, and the images that the suites' pods want. All of them hold busybox.
e2e_cache=$cache/e2e-$(find "$root/hack/e2e" -type f | sort | xargs cat | sha256sum | cut -c 1-12)
e2e_programs=(
    "storage.test ./storage"
    "ginkgo github.com/onsi/ginkgo/v2/ginkgo"
    "agnhost k8s.io/kubernetes/test/images/agnhost"
    "snapshot-metadata-verifier ./verifier"
)
e2e_registry=registry.k8s.io/e2e-test-images
e2e_images=(
    "agnhost $e2e_registry/agnhost:2.66.1"
    "busybox $e2e_registry/busybox:1.37.0-2"
    "glibc-dns-testing $e2e_registry/glibc-dns-testing:2.1.1"
    "nginx $e2e_registry/nginx:1.27.0-2"
    "golang docker.io/library/golang:1.26.1"
)

# Whether all programs and the images of programs are there.
built() {
    local program
    for program in "${kubernetes_programs[@]}"; do [ -x "$kubernetes_bin/$program" ] || return 1; done
    for program in "${other_programs[@]}"; do [ -x "$cluster_cache/bin/$(basename "${program#* }")" ] || return 1; done
    [ -e "$cluster_cache/crds" ] || return 1
    for program in busybox "${program_images[@]%% *}"; do [ -e "$cluster_cache/images/$program.tar" ] || return 1; done
}

# What hack/e2e.sh must know of this machine: ext4 grows while it is mounted only for who has CAP_SYS_RESOURCE, number 24.
bounds=$(awk '$1 == "CapBnd:" { print $2 }' /proc/self/status)
e2e_flags=()
(((0x$bounds >> 24 & 1) == 1)) || e2e_flags=(--no-growth)
