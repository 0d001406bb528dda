#!/usr/bin/env bash
# The first process of a node, in namespaces of its own: makes the places that kubelet and pods write to the node's own,
# then runs the programs of a node, and on the first one those of the control plane. node.sh DIRECTORY NODE NODES
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/lib.sh"
dir=$1 node=$2 nodes=$3
number=${node#node}
here=$dir/$node
pki=$dir/pki
address=10.99.0.1$number
control=10.99.0.11
# Its place by default is in /usr, which is the machine's.
plugins=/var/lib/kubelet/volumeplugins
export PATH=$cluster_cache/bin:$kubernetes_bin:$PATH:/usr/sbin:/sbin

hostname "$node"

# Directories: what is written stays in the node's own, and nothing is made on the machine.
for place in var/lib var/log; do
    mkdir -p "$here/$place"
    mount --bind "$here/$place" "/$place"
done
mkdir -p /var/lib/kubelet/plugins /var/lib/kubelet/plugins_registry /var/lib/containerd /var/log/pods
mkdir -p "$here/etc" "$here/etc-work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$here/etc,workdir=$here/etc-work" /etc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/containerd /etc/cni/net.d
rm -f /etc/resolv.conf
printf "nameserver %s\nsearch cluster.local\n" "$control" >/etc/resolv.conf
printf '127.0.0.1 localhost\n%s %s\n' "$address" "$node" >/etc/hosts

# A /dev of its own, as in a container: what a driver makes there is seen by this node alone.
devices=$(find /dev -maxdepth 1 -regex '/dev/loop[0-9]+' -printf '%f\n')
mkdir -p /run/dev
mount -t tmpfs -o mode=755,nosuid tmpfs /run/dev
mkdir /run/dev/pts /run/dev/shm /run/dev/mqueue
for device in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 console:5:1 kmsg:1:11 fuse:10:229; do
    IFS=: read -r device major minor <<<"$device"
    mknod -m 0666 "/run/dev/$device" c "$major" "$minor"
done
mknod -m 0660 /run/dev/loop-control c 10 237
for device in $devices; do mknod -m 0660 "/run/dev/$device" b 7 "${device#loop}"; done
ln -s pts/ptmx /run/dev/ptmx
ln -s /proc/self/fd /run/dev/fd
for stream in stdin:0 stdout:1 stderr:2; do ln -s "/proc/self/fd/${stream#*:}" "/run/dev/${stream%:*}"; done
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts /run/dev/pts
mount -t tmpfs tmpfs /run/dev/shm
mount -t mqueue mqueue /run/dev/mqueue
mount --rbind /run/dev /dev

# /sys of this network namespace, with the cgroups of this cgroup namespace.
version=2
[ -e /sys/fs/cgroup/cgroup.controllers ] || version=1
mount -t sysfs sysfs /sys
if [ "$version" = 2 ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    # A cgroup with processes of its own can have none below that are limited.
    mkdir -p /sys/fs/cgroup/init
    while read -r pid; do echo "$pid" >/sys/fs/cgroup/init/cgroup.procs 2>/dev/null || true; done </sys/fs/cgroup/cgroup.procs
    sed 's/[a-z]*/+&/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
else
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    while IFS=: read -r _ controllers _; do
        [ -n "$controllers" ] || continue
        place=/sys/fs/cgroup/${controllers#name=}
        options=$controllers
        [ "$controllers" = "${controllers#name=}" ] || options=none,$controllers
        mkdir "$place"
        mount -t cgroup -o "$options" cgroup "$place"
    done </proc/self/cgroup
fi

# kubelet sets these for the whole machine. Here it sets files.
mkdir /run/sysctl
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    file=/run/sysctl/$(tr / . <<<"${setting%=*}")
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${setting%=*}"
done
mount --make-rshared /

# The network: addresses of nodes and pods are the same in every cluster, for no cluster sees another's.
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.1; done
ip address add "$address/24" dev eth0
ip link set eth0 up
ip route add default via 10.99.0.1
for ((other = 1; other <= nodes; other++)); do
    [ "$other" = "$number" ] || ip route add "10.244.$other.0/24" via "10.99.0.1$other"
done
echo 1 >/proc/sys/net/ipv4/ip_forward

mkdir -p "$here/config"
cd "$here/config"
cat >/etc/cni/net.d/10-cluster.conflist <<K
{"cniVersion": "0.4.0", "name": "cluster", "plugins": [
  {"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.$number.0/24"}]],
   "routes": [{"dst": "0.0.0.0/0"}]}}]}
K
# No AppArmor profile is loaded: that would be the machine's.
cat >containerd.toml <<K
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "$pause_image"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
K
cat >kubelet.yaml <<K
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $pki/$node.crt
tlsPrivateKeyFile: $pki/$node.key
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
clusterDNS: [$control]
clusterDomain: cluster.local
resolvConf: /etc/resolv.conf
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
imageGCHighThresholdPercent: 100
nodeStatusUpdateFrequency: 5s
volumePluginDir: $plugins
K
cat >proxy.yaml <<K
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: $pki/proxy.kubeconfig}
mode: nftables
clusterCIDR: 10.244.0.0/16
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
hostnameOverride: $node
K
cat >Corefile <<K
.:53 {
  errors
  ready $control:8181
  kubernetes cluster.local in-addr.arpa {
    kubeconfig $pki/admin.kubeconfig cluster
    pods insecure
  }
}
K

# A program that ends is started again, as a service manager would.
service() {
    local name=$1
    shift
    while :; do
        "$@" >>"$here/logs/$name.log" 2>&1 || true
        echo "$name ended, and is started again" >>"$here/logs/$name.log"
        sleep 1
    done
}
answers() { curl --silent --fail --output /dev/null --cacert "$pki/ca.crt" --cert "$pki/admin.crt" --key "$pki/admin.key" "https://$control:6443/readyz"; }

service containerd containerd --config containerd.toml &
if [ "$number" = 1 ]; then
    # What a power cut would lose is not wanted any more.
    service etcd etcd --data-dir /var/lib/etcd --unsafe-no-fsync \
        --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
        --listen-peer-urls http://127.0.0.1:2380 &
    service kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 \
        --advertise-address="$address" --secure-port=6443 --service-cluster-ip-range=10.96.0.0/16 \
        --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
        --service-account-key-file="$pki/accounts.pub" --service-account-signing-key-file="$pki/accounts.key" \
        --service-account-issuer=https://kubernetes.default.svc.cluster.local \
        --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
        --kubelet-client-certificate="$pki/admin.crt" --kubelet-client-key="$pki/admin.key" \
        --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
        --requestheader-client-ca-file="$pki/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy-client \
        --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
        --requestheader-extra-headers-prefix=X-Remote-Extra- \
        --proxy-client-cert-file="$pki/front-proxy.crt" --proxy-client-key-file="$pki/front-proxy.key" &
fi
until answers; do sleep 0.2; done
if [ "$number" = 1 ]; then
    for program in controller-manager scheduler; do
        flags=()
        [ "$program" = scheduler ] || flags=(--service-account-private-key-file="$pki/accounts.key"
            --root-ca-file="$pki/ca.crt" --use-service-account-credentials --flex-volume-plugin-dir="$plugins")
        service "kube-$program" "kube-$program" --kubeconfig="$pki/$program.kubeconfig" \
            --authentication-kubeconfig="$pki/$program.kubeconfig" --authorization-kubeconfig="$pki/$program.kubeconfig" \
            --leader-elect=false "${flags[@]}" &
    done
    service coredns coredns -conf Corefile &
fi
until [ -S /run/containerd/containerd.sock ]; do sleep 0.1; done
service kubelet kubelet --config=kubelet.yaml --kubeconfig="$pki/$node.kubeconfig" --hostname-override="$node" \
    --node-ip="$address" --v=2 &
service kube-proxy kube-proxy --config=proxy.yaml &
# The first process of a pid namespace reaps what others leave.
while :; do wait -n 2>/dev/null || sleep 1; done
