# Names that are no settings but look as if they were meant for one:  awk -v settings="PORT MODE ..." -f stages/misspelt.awk PROFILE - < NAMES
# Prints `unknown NAME -` for what the profile writes as a setting, : "${NAME=...}", and `near NAME SETTING` for variables that the profile or the
# environment (names, one a line) sets under nearly a setting's name: one edit away, or alike to nine tenths (2 x common letters in order / all).

function larger(a, b) { return a > b ? a : b }

function common(a, b,   i, j, above, diagonal) { # length of the longest common subsequence
	for (j = 0; j <= length(b); j++) row[j] = 0
	for (i = 1; i <= length(a); i++) {
		diagonal = 0
		for (j = 1; j <= length(b); j++) {
			above = row[j]
			row[j] = substr(a, i, 1) == substr(b, j, 1) ? diagonal + 1 : larger(above, row[j - 1])
			diagonal = above
		}
	}
	return row[length(b)]
}

BEGIN {
	n = split(settings, setting, " ")
	for (i = 1; i <= n; i++) is_setting[setting[i]] = 1
}

{
	name = $0
	as_setting = sub(/^[ \t]*: "\$\{/, "", name)
	sub(/^[ \t]*export[ \t]+/, "", name)
	if (FILENAME != "-" && !sub(/:?=.*/, "", name)) next
	if (name !~ /^[A-Z][A-Z0-9_]*$/ || name ~ /^TRAJOULE_/ || name in is_setting || name in seen) next
	seen[name] = 1
	if (as_setting) { print "unknown", name, "-"; next }
	for (i = 1; i <= n; i++) {
		s = setting[i]; a = length(name); b = length(s)
		# what shares neither the first nor the last three letters, or is much shorter or longer, is not worth the comparison
		if (a - b > 3 || b - a > 3 || (substr(name, 1, 3) != substr(s, 1, 3) && substr(name, a - 2) != substr(s, b - 2))) continue
		same = common(name, s)
		# another letter in a short name makes another word: NODE is not MODE
		if (2 * same >= 0.9 * (a + b) || (larger(a, b) - same <= 1 && (a != b || a > 5))) { print "near", name, s; next }
	}
}
