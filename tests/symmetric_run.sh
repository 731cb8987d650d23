# Runs a command on two nodes of their own inside one machine: namespaces of processes, network, mounts and host names.
#
#   unshare --net --mount --pid --fork --kill-child --mount-proc bash symmetric_run.sh FOLDER COMMAND ...
#
# `ray symmetric-run` needs them: it takes no loopback address for several nodes, refuses to start where a process of Ray
# runs, and ends all processes of Ray that it sees. FOLDER gets node2.log and node3.log; the status is that of 10.0.0.2.
set -eu
folder=$1 && shift
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/netns "$folder/ray2" "$folder/ray3"
for node in 2 3; do
  ip netns add node$node
  ip -n node$node link set lo up
done
ip link add name veth netns node2 type veth peer name veth netns node3
for node in 2 3; do
  ip -n node$node address add 10.0.0.$node/24 dev veth
  ip -n node$node link set veth up
  ip -n node$node route add default via 10.0.0.$node
done
printf '127.0.0.1 localhost\n10.0.0.2 node2\n10.0.0.3 node3\n' >"$folder/hosts"
: >"$folder/resolv.conf" # a name server that does not answer costs half a minute a connection
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/resolv.conf" /etc/resolv.conf
start() { # with Ray's files in a folder of the node
  ip netns exec "node$1" unshare --mount --uts --pid --fork --kill-child --mount-proc bash -c '
    hostname "node$0" && mkdir -p /tmp/ray && mount --bind "$1/ray$0" /tmp/ray && shift
    "$@"
    exit $?' "$1" "$folder" "${@:2}" >"$folder/node$1.log" 2>&1
}
start 3 env RAY_gcs_rpc_server_reconnect_timeout_s=3 "$@" & # it ends 3 s after the cluster instead of 60
other=$!
start 2 "$@" && status=0 || status=$?
wait $other || true
exit $status
