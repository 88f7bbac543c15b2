#!/bin/bash
cat >/app/rotate.sh <<'S'
#!/bin/bash
folder=$1 keep=$2
if [ ! -d "$folder" ] || ! [[ $keep =~ ^[0-9]+$ ]]; then
  echo "usage: rotate.sh FOLDER KEEP" >&2
  exit 2
fi
names=()
for path in "$folder"/backup-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9].tar; do
  [ -f "$path" ] && [ ! -L "$path" ] && names+=("${path##*/}")
done
for ((i = 0; i < ${#names[@]} - keep; i++)); do
  rm -- "$folder/${names[i]}" && echo "${names[i]}"
done
S
