# Ends everything that the node in this directory has started. Run by the guard when the test is over, however it ended; what is gone
# already is passed over.
cd "$1" || exit 0
ended() { [ -f "$1.pid" ] && kill "$2" "$(cat "$1.pid")" 2>/dev/null; true; }
for p in kubelet scheduler controllers; do ended $p -TERM; done
sleep 0.5
tasks() { command ctr -a "$PWD/ctd.sock" -n k8s.io task ls -q 2>/dev/null; }
for t in $(tasks); do command ctr -a "$PWD/ctd.sock" -n k8s.io task kill -s 9 "$t" 2>/dev/null; done
i=0; while [ -n "$(tasks)" ] && [ $i -lt 20 ]; do
    for t in $(tasks); do command ctr -a "$PWD/ctd.sock" -n k8s.io task rm -f "$t" >/dev/null 2>&1; done
    sleep 0.2; i=$((i + 1))
done
# Their shims end when containerd is told to forget them.
for c in $(command ctr -a "$PWD/ctd.sock" -n k8s.io container ls -q 2>/dev/null); do
    command ctr -a "$PWD/ctd.sock" -n k8s.io container rm "$c" >/dev/null 2>&1
done
for p in kubelet scheduler controllers api containerd etcd; do ended $p -TERM; done
sleep 1
for p in kubelet scheduler controllers api containerd etcd; do ended $p -KILL; done
# Only shims of this node's containerd have its socket in their arguments.
for d in /proc/[0-9]*; do
    if tr '\0' ' ' <"$d/cmdline" 2>/dev/null | grep -q "containerd-shim.*-address $PWD/ctd.sock"; then kill -9 "${d#/proc/}" 2>/dev/null; fi
done
awk '{print $2}' /proc/mounts | grep "^$PWD/" | sort -r | while read -r m; do umount "$m" 2>/dev/null || umount -l "$m"; done
ip link del "$2" 2>/dev/null
# Directories of this machine that were made to mount over them.
while read -r d; do rmdir "$d" 2>/dev/null; done <made
# Control groups of pods, deepest first; those that others use stay.
for h in /sys/fs/cgroup /sys/fs/cgroup/*; do [ -d "$h/kubepods" ] && find "$h/kubepods" -depth -type d -exec rmdir {} + 2>/dev/null; done
rm -rf host ctd ctd-run etcd-data kubelet cni-data certs
true
