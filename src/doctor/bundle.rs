//! What a stranger needs to know of a machine to help with it, in one text that may be posted.
//!
//! Left out are the names of the host and of people, addresses, what lies under a home, and every variable
//! that is neither NCCL's nor CUDA's. What checks saw is scrubbed, too: a library's path may tell a name.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use super::shown;
use super::sight::{Sight, text};
use super::{Facts, VERIFIED};
use crate::machine::NcclVersion;
use crate::record::CheckReport;

/// Most users whose names are looked for.
const MOST_USERS: usize = 1000;
/// People's numbers begin here, and end where the kernel's nobody is. Source: login.defs(5), UID_MIN.
const PEOPLE: std::ops::Range<u32> = 1000..60_000;
/// Variables whose values are hosts, whatever they look like.
const HOSTS: [&str; 3] = ["NCCL_COMM_ID", "NCCL_HOSTID", "NCCL_RAS_ADDR"];

/// What must not be told.
struct Private {
    /// Names of hosts and people, with what stands in their place; the longest first.
    words: Vec<(String, &'static str)>,
    homes: Vec<String>,
}

impl Private {
    fn of(facts: &Facts<'_>, user: Option<&str>) -> Self {
        let mut words: BTreeMap<String, &'static str> = BTreeMap::new();
        let mut homes = BTreeSet::from(["/home".to_owned(), "/root".to_owned(), "/Users".to_owned()]);
        for file in ["/proc/sys/kernel/hostname", "/etc/hostname"] {
            let name = text(facts.root, file).unwrap_or_default();
            let name = name.trim();
            for name in [name, name.split('.').next().unwrap_or_default()] {
                words.insert(name.to_lowercase(), "[host]");
            }
        }
        let users = text(facts.root, "/etc/passwd").unwrap_or_default();
        for line in users.lines().take(MOST_USERS) {
            let fields: Vec<&str> = line.split(':').collect();
            if let [name, _, id, _, _, home, ..] = fields[..]
                && id.parse().is_ok_and(|id| PEOPLE.contains(&id))
            {
                words.insert(name.to_lowercase(), "[user]");
                homes.insert(home.to_owned());
            }
        }
        words.extend(user.map(|name| (name.to_lowercase(), "[user]")));
        for variable in ["USER", "LOGNAME"] {
            words.extend(facts.environment.get(variable).map(|name| (name.to_lowercase(), "[user]")));
        }
        words.extend(facts.environment.get("HOSTNAME").map(|name| (name.to_lowercase(), "[host]")));
        homes.extend(facts.home.map(|home| home.display().to_string()));
        homes.extend(facts.environment.get("HOME").cloned());
        // These stand in every text and are nobody's.
        words.retain(|word, _| word.len() > 1 && !["root", "localhost", "nccl", "nvidia", "gpu"].contains(&&**word));
        homes.retain(|home| home.len() > 1 && home.starts_with('/'));
        let mut words: Vec<_> = words.into_iter().collect();
        words.sort_by_key(|(word, _)| std::cmp::Reverse(word.len()));
        Self { words, homes: homes.into_iter().rev().collect() }
    }

    /// A text without what is private.
    fn scrub(&self, text: &str) -> String {
        self.without_words(&without_addresses(&self.without_homes(text)))
    }

    fn without_homes(&self, text: &str) -> String {
        // A path may have blanks in it: rather lose the words behind it than tell its end.
        const ENDS: &[char] = &['"', '\'', ',', ';', ')', '`'];
        let mut rest = text;
        let mut clean = String::new();
        let first = |rest: &str| self.homes.iter().filter_map(|home| under_home(rest, home)).min();
        while let Some(at) = first(rest) {
            clean.push_str(&rest[..at]);
            clean.push_str("[home]");
            rest = &rest[at..];
            rest = rest.find(ENDS).map_or("", |end| &rest[end..]);
        }
        clean + rest
    }

    fn without_words(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (word, instead) in &self.words {
            // Of other letters than these, lowering may change how many bytes there are.
            let lower = text.to_ascii_lowercase();
            let mut clean = String::new();
            let mut taken = 0;
            for (at, _) in lower.match_indices(word.as_str()) {
                let end = at + word.len();
                let is_part = |character: Option<char>| character.is_some_and(char::is_alphanumeric);
                if at >= taken && !is_part(text[..at].chars().next_back()) && !is_part(text[end..].chars().next()) {
                    clean.push_str(&text[taken..at]);
                    clean.push_str(instead);
                    taken = end;
                }
            }
            clean.push_str(&text[taken..]);
            text = clean;
        }
        text
    }
}

/// Where a path under this home begins.
fn under_home(text: &str, home: &str) -> Option<usize> {
    let is_whole = |at: &usize| {
        let after = text[at + home.len()..].chars().next();
        !after.is_some_and(|character| character.is_alphanumeric() || "-_.".contains(character))
    };
    text.match_indices(home).map(|(at, _)| at).find(is_whole)
}

/// A text without addresses of the internet and of adapters.
fn without_addresses(text: &str) -> String {
    let is_of_one = |character: char| character.is_ascii_hexdigit() || character == '.' || character == ':';
    let mut clean = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|character| !is_of_one(character)).unwrap_or(rest.len());
        let (token, after) = rest.split_at(end);
        clean.push_str(if is_address(token) { "[address]" } else { token });
        let next = after.find(is_of_one).unwrap_or(after.len());
        clean.push_str(&after[..next]);
        rest = &after[next..];
    }
    clean
}

fn is_address(token: &str) -> bool {
    let token = token.trim_end_matches(['.', ':']);
    let is_adapter = || {
        let parts: Vec<&str> = token.split(':').collect();
        parts.len() >= 6 && parts.iter().all(|part| part.len() == 2)
    };
    token.split(':').any(|part| part.parse::<Ipv4Addr>().is_ok()) || token.parse::<Ipv6Addr>().is_ok() || is_adapter()
}

/// Checks, versions, GPUs and how they hang together, in Markdown. `user` is who runs the tool.
pub fn bundle(facts: &Facts<'_>, report: &CheckReport, user: Option<&str>) -> String {
    let sight = Sight::look(facts);
    let private = Private::of(facts, user);
    let mut lines = vec![
        "# nccltune doctor: a machine in short".to_owned(),
        String::new(),
        "Left out: names of hosts and people, addresses, paths under a home, variables of others than NCCL and CUDA."
            .to_owned(),
    ];
    let heading =
        |lines: &mut Vec<String>, words: &str| lines.extend([String::new(), format!("## {words}"), String::new()]);
    heading(&mut lines, "Versions");
    let first = |path: &str| sight.text(path).map(|text| text.lines().next().unwrap_or_default().trim().to_owned());
    let release = sight.text("/etc/os-release").and_then(|text| {
        text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).map(|name| name.trim_matches('"').to_owned())
    });
    let machine = facts.machine;
    for (name, value) in [
        ("nccltune", Some(env!("CARGO_PKG_VERSION").to_owned())),
        ("checked with NCCL", Some(VERIFIED.to_string())),
        ("NCCL", facts.nccl.map(|nccl| format!("{} at {}", NcclVersion::from_code(nccl.version), nccl.path))),
        ("driver", machine.and_then(|machine| machine.driver.clone())),
        ("CUDA of the driver", machine.and_then(|machine| machine.cuda_driver_version).map(|code| code.to_string())),
        ("kernel", first("/proc/sys/kernel/osrelease")),
        ("system", release),
        ("processor", machine.and_then(|machine| machine.cpu.clone())),
        ("copied files", facts.files_only.then(|| "yes: nothing but files was asked".to_owned())),
    ] {
        lines.extend(value.map(|value| format!("- {name}: {}", private.scrub(&shown(&value)))));
    }
    heading(&mut lines, "GPUs");
    for gpu in machine.iter().flat_map(|machine| &machine.gpus) {
        let device = format!("/sys/bus/pci/devices/{}", gpu.pci_bus_id);
        let place = sight.real_path(Path::new(&device)).display().to_string();
        let node = sight.text(&format!("{device}/numa_node")).map_or("unknown".to_owned(), |node| shown(node.trim()));
        let nvlinks = gpu.nvlinks.map_or("unknown".to_owned(), |links| links.to_string());
        let line = format!("- GPU {}: {}, {place}, node {node}, NVLinks {nvlinks}", gpu.index, shown(&gpu.name));
        lines.push(private.scrub(&shown(&line)));
    }
    heading(&mut lines, "Variables");
    let ours = facts.environment.iter().filter(|(name, _)| name.starts_with("NCCL_") || name.starts_with("CUDA_"));
    for (name, value) in ours.take(200) {
        let is_private = HOSTS.contains(&&**name) || private.homes.iter().any(|home| value.contains(home));
        let value = if is_private { "(left out)".to_owned() } else { private.scrub(&shown(value)) };
        lines.push(format!("- {}={value}", shown(name)));
    }
    heading(&mut lines, "Checks");
    for check in &report.checks {
        lines.push(format!("- {} `{}`: {}", check.verdict.name(), check.name, check.question));
        lines.push(format!("  - seen: {}", private.scrub(&crate::wording::printable(&check.evidence, 2000))));
        if !check.advice.is_empty() {
            lines.push(format!("  - advice: {}", private.scrub(&crate::wording::printable(&check.advice, 2000))));
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Planted;
    use super::*;

    #[test]
    fn private_strings_stay_out_and_the_rest_stays_in() {
        let mut planted = Planted::sick();
        planted.write("/etc/hostname", "Build-Box-7.example.org\n");
        planted.write(
            "/etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\ncarol:x:1001:1001:Carol:/data/people/carol:/bin/sh\n",
        );
        planted.write("/proc/sys/kernel/osrelease", "6.8.0-build-box-7\n");
        for (name, value) in [
            ("NCCL_SOCKET_IFNAME", "bond-alice"),
            ("NCCL_COMM_ID", "node17:9999"),
            ("NCCL_TOPO_FILE", "/srv/alice/my models/secret-project.xml"),
            ("NCCL_OOB_NET_IFNAME", "10.20.30.40"),
            ("CUDA_CACHE_PATH", "/data/people/carol/cache"),
            ("NCCL_NET", "fe80::1:2 and 02:42:ac:11:00:02 at build-box-7"),
            ("AWS_SECRET_ACCESS_KEY", "hunter2"),
            ("USER", "alice"),
        ] {
            planted.set(name, value);
        }
        planted.nccl.as_mut().unwrap().path = ["/home", "bob/venv/lib/libnccl.so.2"].join("/");
        let facts = planted.facts();
        let mut report = planted.report();
        report.checks[0].evidence = "dave's server on 192.168.7.9:8000 by carol, /srv/alice/x".to_owned();
        let text = bundle(&facts, &report, Some("dave"));
        for private in [
            "alice",
            "Build-Box",
            "build-box",
            "example.org",
            "carol",
            "bob",
            "dave",
            "node17",
            "secret-project",
            "10.20.30.40",
            "192.168",
            "fe80",
            "02:42",
            "hunter2",
            "AWS_",
        ] {
            assert!(!text.contains(private), "{private} in\n{text}");
        }
        for kept in [
            "nccltune: ",
            "driver: 580.95.05",
            "NCCL: 2.21.5 at [home]",
            "0000:0b:00.0",
            "NCCL_P2P_DISABLE=1",
            "NCCL_COMM_ID=(left out)",
            "[user]'s server on [address] by [user], [home]",
        ] {
            assert!(text.contains(kept), "{kept} not in\n{text}");
        }
        assert!(report.checks.iter().all(|check| text.contains(&format!("`{}`", check.name))));
    }

    #[test]
    fn addresses_are_told_from_versions_and_places() {
        for kept in ["580.95.05", "0000:3b:00.0", "2.28.9", "gen 5 x16", "12:30:01", "dead:beef", "a.b.c.d"] {
            assert_eq!(without_addresses(kept), kept);
        }
        assert_eq!(without_addresses("(10.0.0.1:80)"), "([address])");
        assert_eq!(without_addresses("[::1]:80, ab:cd:ef:01:23:45."), "[[address]]:80, [address]");
    }
}
