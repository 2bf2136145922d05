//! Every query that the project ships, asked of a real Prometheus as Grafana and the rules do: panels, annotations and host
//! variables of the dashboards, and the alert rules. Each has to be answered with a number.

use std::fmt;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Prometheus, escaped};
use crate::dashboards;

/// `$__rate_interval` where the source's scrape interval is Grafana's default of 15 s.
const RATE_INTERVAL: &str = "1m";

/// A query and what came of it.
pub(crate) struct Asked {
    place: String,
    query: String,
    form: Form,
    /// Of the answer.
    series: usize,
    /// The largest of them.
    value: f64,
}

/// What of a query was asked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// All of it.
    Whole,
    /// A rule that does not fire: all but its threshold.
    NoThreshold,
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.form {
            Form::Whole => "",
            Form::NoThreshold => " (does not fire; without its threshold)",
        };
        write!(f, "{:>4} {:>14.3}  {}{form}\n{:21}{}", self.series, self.value, self.place, "", self.query)
    }
}

impl Prometheus {
    /// Asks them all. `host`: the `instance` of the agent that a dashboard of one host shows.
    pub(crate) fn answers_everything(&self, host: &str) -> Result<Vec<Asked>> {
        let mut asked = Vec::new();
        for dashboard in dashboards::ALL {
            // Where several hosts can be chosen, all of them.
            let instance = if dashboard.one_host { host } else { ".+" };
            for panel in dashboard.panels {
                for (expression, _) in panel.queries {
                    let place = format!("{}, panel {:?}", dashboard.title, panel.title);
                    asked.push(self.whole(place, filled(expression, instance))?);
                }
            }
            let annotation = filled(dashboards::ANNOTATION, instance);
            asked.push(self.whole(format!("{}, annotations", dashboard.title), annotation)?);
        }
        self.has_host(host)?;
        let rules = self.api("/api/v1/rules")?;
        let groups = rules["groups"].as_array().context("no groups of rules")?;
        let rules = groups.iter().filter_map(|group| group["rules"].as_array()).flatten();
        let before = asked.len();
        for rule in rules {
            asked.push(self.rule(rule)?);
        }
        if asked.len() == before {
            bail!("Prometheus has no rules");
        }
        Ok(asked)
    }

    fn whole(&self, place: String, query: String) -> Result<Asked> {
        match self.ask(&query).with_context(|| place.clone())? {
            Some((series, value)) => Ok(Asked { place, query, form: Form::Whole, series, value }),
            None => bail!("{place}: no data for `{query}`; see {}", self.log.display()),
        }
    }

    fn rule(&self, rule: &Value) -> Result<Asked> {
        let name = rule["name"].as_str().context("a rule without a name")?;
        let query = rule["query"].as_str().context("a rule without a query")?;
        let place = format!("alert {name}");
        let bare = without_threshold(query).with_context(|| format!("{place} has no threshold: {query}"))?;
        for (form, query) in [(Form::Whole, query), (Form::NoThreshold, bare)] {
            if let Some((series, value)) = self.ask(query).with_context(|| place.clone())? {
                return Ok(Asked { place, query: query.to_owned(), form, series, value });
            }
        }
        bail!("{place}: no data for `{query}`; see {}", self.log.display())
    }

    /// Series of the answer and the largest value; `None` where there is no number.
    fn ask(&self, query: &str) -> Result<Option<(usize, f64)>> {
        let data = self.api(&format!("/api/v1/query?query={}", escaped(query)))?;
        let result = data["result"].as_array().context("an answer without a result")?;
        let values = result.iter().filter_map(|series| series["value"][1].as_str()?.parse::<f64>().ok());
        let largest = values.filter(|value| !value.is_nan()).reduce(f64::max);
        Ok(largest.map(|largest| (result.len(), largest)))
    }

    /// The dashboards' variable offers the host.
    fn has_host(&self, host: &str) -> Result<()> {
        let data = self.api("/api/v1/label/instance/values?match[]=roomtrace_build_info")?;
        if !data.as_array().is_some_and(|all| all.iter().any(|value| value == host)) {
            bail!("the dashboards' variable offers {data}, not {host}");
        }
        Ok(())
    }
}

/// As Grafana fills it in.
fn filled(expression: &str, instance: &str) -> String {
    expression.replace("$__rate_interval", RATE_INTERVAL).replace("$instance", instance)
}

/// A rule's expression up to its last comparison with a number.
fn without_threshold(query: &str) -> Option<&str> {
    let (rest, number) = query.trim().rsplit_once(' ')?;
    number.parse::<f64>().ok()?;
    let (bare, comparison) = rest.trim_end().rsplit_once(' ')?;
    [">", ">=", "<", "<=", "==", "!="].contains(&comparison).then(|| bare.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_what_a_rule_compares_with() {
        assert_eq!(without_threshold("sum(a{b=\"c > 1\"}) > 0"), Some("sum(a{b=\"c > 1\"})"));
        assert_eq!(without_threshold("up{job=~\".*roomtrace.*\"} == 0"), Some("up{job=~\".*roomtrace.*\"}"));
        assert_eq!(without_threshold("max(a)"), None);
    }
}
