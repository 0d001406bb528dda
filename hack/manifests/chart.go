package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"sigs.k8s.io/yaml"
)

// namespace is that of the manifests, so that the chart's can be compared with them.
const namespace = "deltapath"

// charted says what a chart is to render, and what values it is to refuse.
type charted struct {
	Chart string
	// Objects of the manifests that are no part of the chart, as Kind/name.
	Without []string
	Same    []struct {
		Manifests []string
		Values    map[string]any
	}
	Valid []struct {
		Values map[string]any
		// Default: that of the manifests.
		Namespace string
		// Kubernetes 1.31, which has no storage.k8s.io/v1 VolumeAttributesClass.
		Old bool
		// What is in the objects, and what is not.
		With, Without []string
		// What helm prints after an installation.
		Notes []string
	}
	Refused []struct {
		// As above.
		Old    bool
		Values map[string]any
		Why    string
	}
}

// checkChart lints a chart, renders it with all the values that a file has, and checks what comes out as manifests are checked:
// it is valid, and for some values the same as manifests that are named.
func checkChart(customs customs, file string) []error {
	cases := charted{}
	text, err := os.ReadFile(file)
	if err == nil {
		err = yaml.UnmarshalStrict(text, &cases)
	}
	if err != nil {
		return []error{fmt.Errorf("%s: %w", file, err)}
	}
	// Of each symbolic link in a chart the loader says that there is one.
	log.SetOutput(io.Discard)
	var faults []error
	for _, message := range lint.All(cases.Chart, nil, namespace, true).Messages {
		if message.Severity >= support.WarningSev {
			faults = append(faults, fmt.Errorf("helm lint: %w", message))
		}
	}
	// checked gives the chart's objects by name.
	checked := func(values map[string]any, into string, old bool) (map[string]any, error) {
		source := fmt.Sprintf("%s with %v", cases.Chart, values)
		text, _, err := renderChart(cases.Chart, values, into, old)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", source, err)
		}
		objects, wrong := parse(customs, source, text)
		faults = append(faults, wrong...)
		named, err := byName(objects)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", source, err)
		}
		return named, nil
	}
	for _, same := range cases.Same {
		of := strings.Join(same.Manifests, " and ")
		ours, err := checked(same.Values, namespace, false)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		var objects []found
		for _, path := range same.Manifests {
			text, err := render(path)
			if err != nil {
				faults = append(faults, fmt.Errorf("%s: %w", path, err))
				continue
			}
			// They are checked as manifests, not here.
			some, _ := parse(customs, path, text)
			objects = append(objects, some...)
		}
		theirs, err := byName(objects)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", of, err))
			continue
		}
		for _, name := range cases.Without {
			delete(theirs, name)
		}
		for _, difference := range differences("", theirs, ours) {
			faults = append(faults, fmt.Errorf("%s has, and the chart with %v: %s", of, same.Values, difference))
		}
	}
	for _, valid := range cases.Valid {
		into := cmp.Or(valid.Namespace, namespace)
		objects, err := checked(valid.Values, into, valid.Old)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		text, err := yaml.Marshal(objects)
		if err != nil {
			return append(faults, err)
		}
		for _, word := range valid.With {
			if !strings.Contains(string(text), word) {
				faults = append(faults, fmt.Errorf("the chart with %v: nothing says %q", valid.Values, word))
			}
		}
		_, notes, err := renderChart(cases.Chart, valid.Values, into, valid.Old)
		if err != nil {
			return append(faults, err)
		}
		for _, word := range valid.Notes {
			if !strings.Contains(notes, word) {
				faults = append(faults, fmt.Errorf("the chart with %v: its notes do not say %q", valid.Values, word))
			}
		}
		for _, word := range valid.Without {
			if strings.Contains(string(text), word) {
				faults = append(faults, fmt.Errorf("the chart with %v: something says %q", valid.Values, word))
			}
		}
	}
	for _, refused := range cases.Refused {
		if _, _, err := renderChart(cases.Chart, refused.Values, namespace, refused.Old); err == nil {
			faults = append(faults, fmt.Errorf("the chart takes %v", refused.Values))
		} else if !strings.Contains(err.Error(), refused.Why) {
			faults = append(faults, fmt.Errorf("the chart with %v does not say %q, but %w", refused.Values, refused.Why, err))
		}
	}
	return faults
}

// renderChart gives the YAML that `helm template` gives, for a cluster of the pinned version, and the notes.
func renderChart(dir string, values map[string]any, into string, old bool) ([]byte, string, error) {
	chart, err := loader.LoadDir(dir)
	if err != nil {
		return nil, "", err
	}
	capabilities := chartutil.DefaultCapabilities.Copy()
	capabilities.KubeVersion = chartutil.KubeVersion{Version: "v1.31.0", Major: "1", Minor: "31"}
	if !old {
		capabilities.KubeVersion = chartutil.KubeVersion{Version: "v1.37.0", Major: "1", Minor: "37"}
		capabilities.APIVersions = append(capabilities.APIVersions, "storage.k8s.io/v1/VolumeAttributesClass")
	}
	options := chartutil.ReleaseOptions{Name: namespace, Namespace: into, Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, values, options, capabilities)
	if err != nil {
		return nil, "", err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, "", err
	}
	notes := ""
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		switch {
		case strings.HasSuffix(name, "NOTES.txt"):
			notes = files[name]
		case filepath.Ext(name) == ".yaml":
			text.WriteString("---\n" + files[name] + "\n")
		}
	}
	return []byte(text.String()), notes, nil
}

func byName(objects []found) (map[string]any, error) {
	named := map[string]any{}
	for _, object := range objects {
		metadata, _ := object.Object["metadata"].(map[string]any)
		name := fmt.Sprintf("%v/%v", object.Object["kind"], metadata["name"])
		if space, ok := metadata["namespace"]; ok && space != namespace {
			name = fmt.Sprintf("%v in %v", name, space)
		}
		if _, twice := named[name]; twice {
			return nil, fmt.Errorf("%s twice", name)
		}
		named[name] = object.Object
	}
	if len(named) == 0 {
		return nil, errors.New("no objects")
	}
	return named, nil
}

// differences lists what is not the same in two values, each with its path.
func differences(path string, one, other any) []string {
	if fields, ok := one.(map[string]any); ok {
		if others, ok := other.(map[string]any); ok {
			names := maps.Clone(fields)
			maps.Copy(names, others)
			var all []string
			for _, name := range slices.Sorted(maps.Keys(names)) {
				all = append(all, differences(path+"."+name, fields[name], others[name])...)
			}
			return all
		}
	}
	if items, ok := one.([]any); ok {
		if others, ok := other.([]any); ok && len(items) == len(others) {
			var all []string
			for i := range items {
				all = append(all, differences(fmt.Sprintf("%s[%d]", path, i), items[i], others[i])...)
			}
			return all
		}
	}
	if reflect.DeepEqual(one, other) {
		return nil
	}
	return []string{fmt.Sprintf("%s: %v, and %v", strings.TrimPrefix(path, "."), one, other)}
}
