// alerts plays the alerts of the Helm chart, with Prometheus' own code and series that a file has: each must fire where it is to
// fire, and must not where it is not. What the dashboard asks for must be PromQL.
//
//	alerts TEMPLATE CASES DASHBOARD
//
// Or it evaluates them on the metrics of running programs: it scrapes each address ROUNDS times, once a second, counts each second as a
// minute, and prints the alerts that fire after the last one.
//
//	alerts scrape TEMPLATE ROUNDS POD=ADDRESS...
//
// It is a module of its own, since Prometheus needs other versions of Kubernetes' libraries than the checker of the manifests.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/annotations"
	"go.yaml.in/yaml/v3"
)

// rules is a PrometheusRule.
type rules struct {
	Spec struct {
		Groups []struct {
			Rules []rule
		}
	}
}

type rule struct {
	Alert, Expr string
	For         string
}

// Each is a list of series, in promtool's notation, with a sample a minute. The alert is looked at with the last one.
type cases map[string]struct {
	Fires, Quiet [][]string
}

var parsed = parser.NewParser(parser.Options{})

func main() {
	if len(os.Args) > 4 && os.Args[1] == "scrape" {
		if err := scrape(os.Args[2], os.Args[3], os.Args[4:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "alerts: name the template of the alerts, the file of the cases, and the dashboard")
		os.Exit(2)
	}
	if err := errors.Join(play(os.Args[1], os.Args[2]), ask(os.Args[3])); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func play(templateFile, casesFile string) error {
	all, err := render(templateFile)
	if err != nil {
		return fmt.Errorf("%s: %w", templateFile, err)
	}
	played := cases{}
	if err := read(casesFile, &played); err != nil {
		return err
	}
	var faults []error
	for _, rule := range all {
		of := played[rule.Alert]
		delete(played, rule.Alert)
		if len(of.Fires) == 0 || len(of.Quiet) == 0 {
			faults = append(faults, fmt.Errorf("%s: it needs a case in which it fires, and one in which it does not", rule.Alert))
		}
		for _, series := range of.Fires {
			if fires, err := rule.fires(series, time.Unix(0, 0)); err != nil || !fires {
				faults = append(faults, fmt.Errorf("%s does not fire for %q: %v", rule.Alert, series, err))
			}
		}
		for _, series := range of.Quiet {
			if fires, err := rule.fires(series, time.Unix(0, 0)); err != nil || fires {
				faults = append(faults, fmt.Errorf("%s fires for %q: %v", rule.Alert, series, err))
			}
		}
	}
	for name := range played {
		faults = append(faults, fmt.Errorf("there is no alert %s", name))
	}
	return errors.Join(faults...)
}

func scrape(templateFile, count string, targets []string) error {
	all, err := render(templateFile)
	if err != nil {
		return err
	}
	rounds, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	start, next := time.Now(), time.Tick(time.Second)
	client := http.Client{Timeout: time.Second}
	series := map[string]string{}
	for round := range rounds {
		for _, target := range targets {
			pod, address, _ := strings.Cut(target, "=")
			gauges, up := answer(client, address)
			gauges[fmt.Sprintf("up{namespace=%q,instance=%q}", "deltapath", address)] = up
			for name, value := range gauges {
				bare, labels, _ := strings.Cut(strings.TrimSuffix(name, "}"), "{")
				name = fmt.Sprintf("%s{pod=%q,%s}", bare, pod, labels)
				before := series[name]
				series[name] = before + strings.Repeat(" _", round-strings.Count(before, " ")) + " " + value
			}
		}
		<-next
	}
	lines := []string{}
	for name, values := range series {
		lines = append(lines, name+values)
	}
	for _, rule := range all {
		if fires, err := rule.fires(lines, start); err != nil {
			return fmt.Errorf("%s: %w", rule.Alert, err)
		} else if fires {
			fmt.Println(rule.Alert)
		}
	}
	return nil
}

// answer gives the gauges of a program, by name and labels, and what Prometheus says of it: 1, or 0 if it does not answer.
func answer(client http.Client, address string) (map[string]string, string) {
	gauges := map[string]string{}
	response, err := client.Get("http://" + address + "/metrics")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return gauges, "0"
	}
	defer response.Body.Close()
	gauge := ""
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		line := lines.Text()
		if fields := strings.Fields(line); len(fields) == 4 && fields[1] == "TYPE" {
			gauge = ""
			if fields[3] == "gauge" {
				gauge = fields[2]
			}
		} else if at := strings.LastIndexByte(line, ' '); gauge != "" && strings.HasPrefix(line, gauge) && at > 0 {
			gauges[line[:at]] = line[at+1:]
		}
	}
	return gauges, "1"
}

// read takes a value out of a YAML or JSON file.
func read(file string, into any) error {
	text, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(text, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// ask parses what the panels of a dashboard ask for.
func ask(file string) error {
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := read(file, &dashboard); err != nil {
		return err
	}
	var faults []error
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			if _, err := parsed.ParseExpr(strings.ReplaceAll(target.Expr, "$__rate_interval", "5m")); err != nil {
				faults = append(faults, fmt.Errorf("%s: %s: %q: %w", file, panel.Title, target.Expr, err))
			}
		}
	}
	return errors.Join(faults...)
}

// render gives the chart's alerts, all of them.
func render(file string) ([]rule, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	// Of Helm's functions the alerts call none, but the rest of the file does.
	unused := func(...any) string { return "" }
	functions := template.FuncMap{}
	for _, name := range []string{"append", "dict", "include", "list", "nindent", "quote", "set", "toYaml"} {
		functions[name] = unused
	}
	chart, err := template.New(file).Funcs(functions).Parse(string(text))
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = chart.Execute(&out, map[string]any{
		"Release": map[string]any{"Namespace": "deltapath"},
		"Values": map[string]any{
			"mode":             "distributed",
			"snapshotMetadata": "gateway",
			"monitoring":       map[string]any{"podMonitor": false, "alerts": true, "dashboard": false, "labels": nil},
		},
	})
	if err != nil {
		return nil, err
	}
	object := rules{}
	if err := yaml.Unmarshal(out.Bytes(), &object); err != nil {
		return nil, err
	}
	var all []rule
	for _, group := range object.Spec.Groups {
		all = append(all, group.Rules...)
	}
	if len(all) == 0 {
		return nil, errors.New("it has no alerts")
	}
	return all, nil
}

// fires says whether the expression holds for the same labels in each minute of the alert's `for`, up to the last sample.
func (r rule) fires(lines []string, start time.Time) (bool, error) {
	data, last, err := load(lines, start)
	if err != nil {
		return false, err
	}
	hold := time.Duration(0)
	if r.For != "" {
		if hold, err = time.ParseDuration(r.For); err != nil {
			return false, err
		}
	}
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute, Parser: parsed})
	defer engine.Close()
	var firing map[string]bool
	for at := last.Add(-hold); !at.After(last); at = at.Add(time.Minute) {
		query, err := engine.NewInstantQuery(context.Background(), data, nil, r.Expr, at)
		if err != nil {
			return false, err
		}
		vector, err := query.Exec(context.Background()).Vector()
		if err != nil {
			return false, err
		}
		now := map[string]bool{}
		for _, sample := range vector {
			now[sample.Metric.String()] = true
		}
		query.Close()
		if firing == nil {
			firing = now
		}
		maps.DeleteFunc(firing, func(name string, _ bool) bool { return !now[name] })
	}
	return len(firing) > 0, nil
}

// load gives the series, and the time of the last sample.
func load(lines []string, start time.Time) (storage.Queryable, time.Time, error) {
	var all []storage.Series
	last := start
	for _, line := range lines {
		name, values, err := parsed.ParseSeriesDesc(line)
		if err != nil {
			return nil, last, fmt.Errorf("%s: %w", line, err)
		}
		series := promql.Series{Metric: name}
		for minute, value := range values {
			if at := start.Add(time.Duration(minute) * time.Minute); !value.Omitted {
				series.Floats = append(series.Floats, promql.FPoint{T: at.UnixMilli(), F: value.Value})
				if at.After(last) {
					last = at
				}
			}
		}
		all = append(all, promql.NewStorageSeries(series))
	}
	slices.SortFunc(all, func(a, b storage.Series) int { return strings.Compare(a.Labels().String(), b.Labels().String()) })
	find := func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
		var found []storage.Series
		for _, series := range all {
			wrong := func(m *labels.Matcher) bool { return !m.Matches(series.Labels().Get(m.Name)) }
			if !slices.ContainsFunc(matchers, wrong) {
				found = append(found, series)
			}
		}
		return &set{found, -1}
	}
	return &storage.MockQueryable{MockQuerier: &storage.MockQuerier{SelectMockFunction: find}}, last, nil
}

type set struct {
	series []storage.Series
	at     int
}

func (s *set) Next() bool                        { s.at++; return s.at < len(s.series) }
func (s *set) At() storage.Series                { return s.series[s.at] }
func (s *set) Err() error                        { return nil }
func (s *set) Warnings() annotations.Annotations { return nil }
