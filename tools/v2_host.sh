#!/usr/bin/env bash
# Shows the sandbox on a host with control groups of version 2 alone: boots a Debian of its own under qemu's
# software emulation and runs `lehr sandbox check` there, as root and as a user whose group is delegated.
#
#     tools/v2_host.sh [FOLDER]      as root, after make setup; about ten minutes; the report is FOLDER/report.txt
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-$(mktemp -d /var/tmp/lehr-v2-XXXXXX)}"
site="$("$here/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
mkdir -p "$folder"
cd "$folder"

command -v qemu-system-x86_64 debootstrap >/dev/null ||
  apt-get install -y -qq --no-install-recommends qemu-system-x86 debootstrap e2fsprogs
if [ ! -d root/opt ]; then
  debootstrap --variant=minbase \
    --include=python3,bubblewrap,libseccomp2,linux-image-cloud-amd64,systemd-sysv,dbus,procps bookworm root
  chroot root useradd -m tester
fi
mkdir -p root/opt/lehr/site
rm -rf root/opt/lehr/src
cp -r "$here/src" root/opt/lehr/src
for name in annotated_types click pydantic pydantic_core pyseccomp.py rich typing_extensions.py typing_inspection \
  markdown_it mdurl numpy numpy.libs pygments psutil; do cp -r "$site/$name" root/opt/lehr/site/; done
cp -r "$site"/lehr-*.dist-info root/opt/lehr/site/
# under emulation everything takes ten to thirty times as long
sed -i 's/^CASE_S = .*/CASE_S = 600.0/' root/opt/lehr/src/lehr/app/commands/sandbox.py

cat >root/opt/lehr/lehr <<'END'
#!/bin/sh
PYTHONPATH=/opt/lehr/src:/opt/lehr/site exec /usr/bin/python3 -m lehr "$@"
END
cat >root/opt/lehr/show <<'END'
#!/bin/bash
exec >/var/log/report.txt 2>&1
export COLUMNS=150
echo "$(uname -r), $(stat -fc %T /sys/fs/cgroup): $(cat /sys/fs/cgroup/cgroup.controllers)"
for user in root tester; do
  for what in doctor "sandbox check"; do
    echo "--- $user: lehr $what"
    systemd-run -q --wait --pipe -p Delegate=yes -p User=$user -p WorkingDirectory=/tmp /opt/lehr/lehr $what
  done
done
systemctl poweroff
END
chmod +x root/opt/lehr/lehr root/opt/lehr/show
cat >root/etc/systemd/system/show.service <<'END'
[Service]
ExecStart=/opt/lehr/show
[Install]
WantedBy=multi-user.target
END
mkdir -p root/etc/systemd/system/multi-user.target.wants
ln -sf /etc/systemd/system/show.service root/etc/systemd/system/multi-user.target.wants/

rm -f disk.img
truncate -s 2G disk.img
mkfs.ext4 -q -d root disk.img
timeout 3000 qemu-system-x86_64 -M q35 -cpu max -accel tcg,thread=multi -smp 2 -m 3G -nographic -no-reboot -nic none \
  -kernel root/boot/vmlinuz-* -initrd root/boot/initrd.img-* -append "root=/dev/vda rw console=ttyS0 quiet" \
  -drive file=disk.img,if=virtio,format=raw </dev/null >boot.log 2>&1
debugfs -R "cat /var/log/report.txt" disk.img >report.txt 2>/dev/null
cat report.txt
echo "report: $folder/report.txt"
